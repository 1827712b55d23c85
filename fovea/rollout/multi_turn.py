"""The turns of an episode after the first: the environment replies, and the model goes on from there.

Token ids only grow: what was drawn stays as it was drawn, and a reply's tokens are appended to it. Re-tokenising the
text of a conversation would give other ids than those that were drawn, whose log-probs would then be of other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fovea.environments.base import Environment
from fovea.environments.prompt_source import RendersPrompts
from fovea.rollout.base import Engine
from fovea.types import Prompt, Request, Task, Turn, TurnTokens


async def later_turns(
    engine: Engine,
    environment: Environment,
    renderer: RendersPrompts,
    task: Task,
    turns: Sequence[Turn],
    request: Request,
) -> tuple[Turn, ...]:
    """The whole episode that begins with these turns, the last of which was drawn for `request`."""
    if len(turns) >= environment.max_turns:
        return tuple(turns)
    messages = environment.reply(task, turns)
    if messages is None:
        return tuple(turns)
    last = turns[-1].tokens
    assert last is not None, "an episode goes on from tokens that an engine drew"
    observation = renderer.observation(
        messages, after=int(last.completion.token_ids_T[-1]), where=f"turn {len(turns) + 1} of {task.id}"
    )
    more = Request(
        id=f"{last.completion.id}/turn{len(turns) + 1}",
        prompt=extended(request.prompt, last.completion.token_ids_T, observation),
        sampling=replace(request.sampling, seed=_next_seed(request.sampling.seed, last.completion.id)),
        keep=len(turns) + 1 < environment.max_turns,
        continues=last.completion.id,
    )
    (completion,) = await engine.generate(more)
    turn = Turn(
        messages=tuple(messages),
        text=completion.text,
        finish=completion.finish,
        tokens=TurnTokens(observation=observation, completion=completion),
    )
    return await later_turns(engine, environment, renderer, task, (*turns, turn), more)


def extended(prompt: Prompt, answer_ids_T: NDArray[np.int64], observation: Prompt) -> Prompt:
    """The conversation so far as the prompt of the next turn."""
    return Prompt(
        token_ids_L=np.concatenate([prompt.token_ids_L, answer_ids_T, observation.token_ids_L]),
        unexpanded_ids_U=np.concatenate([prompt.unexpanded_ids_U, answer_ids_T, observation.unexpanded_ids_U]),
        images=prompt.images + observation.images,
    )


def _next_seed(seed: int, completion_id: str) -> int:
    """A seed of its own for each completion of a group; the completion's number is the last part of its id."""
    number = int(completion_id.rpartition("/")[2])
    return int(np.random.SeedSequence((seed, number, 1)).generate_state(1, np.uint64)[0])
