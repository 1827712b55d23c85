"""The turns of an episode after the first: the environment replies, and the model answers again."""

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
    """Continue an episode to its end and return all turns; the last of `turns` was generated for `request`."""
    if len(turns) >= environment.max_turns:
        return tuple(turns)
    messages = environment.reply(task, turns)
    if messages is None:
        return tuple(turns)
    last = turns[-1].tokens
    assert last is not None, "an episode continues from tokens that an engine generated"
    # ids are only appended: re-tokenising the text of a conversation may give other ids than those that were sampled,
    # and their log-probs would then belong to other tokens
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
    """Prompt of the next turn: the conversation so far, its token ids appended to each other."""
    return Prompt(
        token_ids_L=np.concatenate([prompt.token_ids_L, answer_ids_T, observation.token_ids_L]),
        unexpanded_ids_U=np.concatenate([prompt.unexpanded_ids_U, answer_ids_T, observation.unexpanded_ids_U]),
        images=prompt.images + observation.images,
    )


def _next_seed(seed: int, completion_id: str) -> int:
    """Seed of the next turn, different for each completion of a group."""
    # the last part of a completion's id is its number in the group
    number = int(completion_id.rpartition("/")[2])
    return int(np.random.SeedSequence((seed, number, 1)).generate_state(1, np.uint64)[0])
