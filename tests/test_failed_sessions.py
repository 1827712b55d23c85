"""Runs whose sessions fail now and then: each costs its episode, and is counted and named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from fovea.config.run import Config
from fovea.errors import TrainError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.metrics.progress import CONSOLE_FILE
from fovea.run.context import Run
from fovea.run.lifecycle import begin
from fovea.wiring.run import build
from fovea_gym.errors import SessionError
from fovea_gym.types import ImageRef, Message, Task, Turn
from fovea_gym.utils.event_loop import wait_for
from tests.failing_sessions import SETTINGS, WARMUP, Door, Doors


def run_of(folder: Path, environment: Doors, **settings: object) -> Run:
    return build(Config.model_validate({**SETTINGS, "run_dir": str(folder), **settings}), environment)


@pytest.mark.parametrize("advantage", ["grpo", "reinforce++_baseline"])
def test_a_run_goes_on_with_the_episodes_that_are_left(advantage: str, tmp_path: Path) -> None:
    algorithm = {"advantage": advantage}
    train(run_of(tmp_path, Doors(failing=1, demonstrated=4), warmup=WARMUP, algorithm=algorithm))
    steps = read_metrics(tmp_path)
    assert [each["step"] for each in steps] == [1, 2]
    assert sum(each["episodes/failed_reply"] for each in steps) > 0
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "unscored.jsonl").read_text().splitlines()]
    demonstrated = [reason for reason in reasons if reason.startswith("a demonstration: train/")]
    # two steps of four rows are all eight rows
    assert len(demonstrated) == 4
    assert all("Doors.reply raised KeyError: 'no such door'" in reason for reason in reasons)
    console = (tmp_path / CONSOLE_FILE).read_text()
    assert "warm-up: 4 demonstrations failed and were left out; see unscored.jsonl" in console
    assert "sessions of the parity gate failed: train/" in console


@pytest.mark.parametrize("advantage", ["gae", "reinforce++"])
def test_the_only_episode_that_is_left_trains_where_none_are_compared(advantage: str, tmp_path: Path) -> None:
    train(run_of(tmp_path, Doors(failing=3), algorithm={"advantage": advantage}))
    left_out = [json.loads(line)["reason"] for line in (tmp_path / "unscored.jsonl").read_text().splitlines()]
    assert not [reason for reason in left_out if reason.startswith("all but one")]


def test_a_run_whose_sessions_all_fail_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match=r"4 of 4 sessions of the parity gate failed: train/0: .*no such door"):
        wait_for(begin(run_of(tmp_path / "gate", Doors(failing=4))))
    with pytest.raises(TrainError, match=r"all 4 demonstrations of a warm-up step failed; the last error: a demonst"):
        wait_for(begin(run_of(tmp_path / "warm-up", Doors(failing=0, demonstrated=8), warmup=WARMUP)))


class OddReply(Door):
    """A session whose reply no prompt can hold."""

    def __init__(self, part: str | ImageRef) -> None:
        super().__init__(opens=True)
        self._part = part

    def reply(self, turns: Sequence[Turn]) -> list[Message]:
        return [Message(role="user", parts=(self._part,))]


class OddReplies(Doors):
    """Doors with such sessions."""

    def __init__(self, part: str | ImageRef) -> None:
        super().__init__(failing=0)
        self._part = part

    def open(self, task: Task, seed: int) -> OddReply:
        return OddReply(self._part)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ("Go on.<|im_end|>", r"the environment's reply contains <\|im_end\|>"),
        (ImageRef(source=b"none", where="room 3"), "room 3: "),
    ],
)
def test_a_reply_that_no_prompt_can_hold_gets_no_advice_for_rows(
    part: str | ImageRef, why: str, tmp_path: Path
) -> None:
    with pytest.raises(SessionError, match=why) as error:
        wait_for(begin(run_of(tmp_path, OddReplies(part))))
    assert "on_bad_row" not in str(error.value)
