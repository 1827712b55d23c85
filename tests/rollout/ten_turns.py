"""Episodes of ten turns with an image in each, and checks of the ids that an engine is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from fovea.models.tiny import TinyParts
from fovea.rollout.base import Engine
from fovea.types import Batch, Completion, Group, Prompt, Request
from fovea_gym.types import Message, Task, Turn
from tests.rollout.two_turns import LooksTwice, batch_of, environment, sampled
from tests.tiny_models import image

TURNS = 10


class Gallery(LooksTwice):
    """Every answer gets another picture."""

    max_turns = TURNS
    first_seed = 100

    def reply(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message]:
        number = len(turns)
        return (Message(role="user", parts=(image(self.seed_of(number)), f"What is {number}?")),)

    def seed_of(self, number: int) -> int:
        return self.first_seed + number


def ten_turns(parts: TinyParts, engine: Engine, kind: type[Gallery] = Gallery) -> list[Group]:
    return sampled(parts, engine, rows=1, n=2, asked=environment(kind))


def drawn_and_checked(parts: TinyParts, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Batch:
    """A batch of two episodes, the prompts of whose turns extended each other."""
    asked, generate = dict[str, Prompt](), engine.generate

    async def noted(request: Request) -> Sequence[Completion]:
        asked[request.id] = request.prompt
        return await generate(request)

    monkeypatch.setattr(engine, "generate", noted)
    groups = ten_turns(parts, engine)
    batch = batch_of(groups)
    assert [len(sample.images) for sample in batch.samples] == [TURNS - 1] * 2
    assert len(asked) == 1 + 2 * (TURNS - 1)
    for episode, sample in zip(groups[0].episodes, batch.samples, strict=True):
        whole = np.concatenate([groups[0].prompt.token_ids_L, sample.token_ids_T])
        for before, turn in pairwise(episode.tokens):
            prompt_L = asked[turn.completion.id.rpartition("/")[0]].token_ids_L
            np.testing.assert_array_equal(prompt_L, whole[: len(prompt_L)])
            added = np.concatenate([before.completion.token_ids_T, turn.observation.token_ids_L])
            np.testing.assert_array_equal(prompt_L[-len(added) :], added)
    return batch
