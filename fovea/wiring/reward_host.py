"""The process of a reward; the other end is in `fovea_gym.environments.custom.processes`.

It does not import torch, unless the user's file does.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from fovea.config.sections import Data
from fovea.wiring.images import make_opener
from fovea_gym.environments.custom.grader import reward_grader
from fovea_gym.environments.custom.loading import load_reward
from fovea_gym.environments.custom.processes import HEADER, score_to_json
from fovea_gym.errors import FoveaError, first_line, named, result_or_error
from fovea_gym.graders.base import Grader, NoScoreError
from fovea_gym.graders.grading import result_of
from fovea_gym.types import Turn


class CallsHere:
    """Runs calls in the main thread, since no other call waits meanwhile."""

    async def run(self, call: Callable[[], object]) -> object:
        return result_of(*result_or_error(call))


def main(descriptor: int) -> None:
    """Load the rewards that the first message names, then score answers one by one until the trainer ends."""
    os.set_inheritable(descriptor, False)
    pipe = socket.socket(fileno=descriptor).makefile("rwb")
    settings = _receive(pipe)
    if settings is None:
        return
    try:
        grader = _grader(json.loads(settings))
    except FoveaError as error:
        _send(pipe, {"problem": str(error)})
        return
    _send(pipe, {})
    with asyncio.Runner() as runner:
        while (message := _receive(pipe)) is not None:
            _send(pipe, runner.run(_answer(grader, message)))


def _grader(settings: Mapping[str, Any]) -> Grader:
    opener = make_opener(Data.model_validate(settings["data"]), Path(settings["run_dir"]))
    reward, weights = settings["reward"], settings["weights"]
    functions = [load_reward(name) for name in ([reward] if isinstance(reward, str) else reward)]
    return reward_grader(reward, functions, weights, opener, CallsHere())


async def _answer(grader: Grader, message: bytes) -> dict[str, Any]:
    why = "cannot be called in a process, since the task holds an object that cannot be read there"
    fix = "keep plain values in Task.row, or set reward_in=thread"
    try:
        with named(lambda error: NoScoreError(f"{why} ({first_line(error)}); {fix}")):
            # safe to unpickle, since only the trainer can send it: the socket is inherited and has no address
            task, text, num_tokens = pickle.loads(message)
        turn = Turn(messages=(), text=text, num_tokens=num_tokens)
        return score_to_json(await grader.score(task, [turn]))
    except NoScoreError as error:
        return {"failed": str(error)}


def _receive(pipe: BufferedRWPair) -> bytes | None:
    """The next message; None if the trainer has ended."""
    header = pipe.read(HEADER.size)
    return pipe.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else None


def _send(pipe: BufferedRWPair, answer: Mapping[str, Any]) -> None:
    content = json.dumps(answer).encode()
    pipe.write(HEADER.pack(len(content)) + content)
    pipe.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
