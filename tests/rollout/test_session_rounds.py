"""Conversations on the embedded engine: they repeat whatever the delay of replies, and no turn is blind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from fovea.train.base import Needs
from fovea.types import Group
from fovea_gym.environments.base import Session
from fovea_gym.environments.sessions import LimitedSessions
from fovea_gym.settings.splits import SessionLimits
from fovea_gym.types import Message, Task, Turn
from tests.policies import make_policy
from tests.reference import reference_logprobs
from tests.rollout.drawing import make_engine
from tests.rollout.two_turns import TEMPERATURE, LooksTwice, batch_of, environment, sampled
from tests.tiny_models import FAMILIES, tiny

TOLERANCE = 2e-5
TURNS = 10


class LateReplies(LooksTwice):
    """Replies that are the same in every run, after delays that are not; some episodes end early."""

    random = np.random.default_rng(0)

    async def open(self, task: Task, seed: int) -> Session:
        return LateSession(self, task, ends=seed % 3 == 0)


class LateSession(Session):
    def __init__(self, late: LateReplies, task: Task, *, ends: bool) -> None:
        self.late, self.task, self.ends = late, task, ends

    async def reply(self, turns: Sequence[Turn]) -> Sequence[Message] | None:
        await asyncio.sleep(self.late.random.uniform(0, 0.05))
        return None if self.ends and len(turns) == 2 else self.late.reply(self.task, turns)

    async def close(self) -> None: ...


def test_a_rollout_repeats_bit_for_bit_whichever_reply_comes_first() -> None:
    parts = tiny("qwen3_vl")

    late = environment(LateReplies)
    assert isinstance(late, LateReplies)
    limited = LimitedSessions(late, SessionLimits(max_concurrent=5), "late")
    # the delays of the second rollout are other ones
    first, second = (sampled(parts, make_engine(parts), asked=limited, n=4) for _ in range(2))
    assert len({len(episode.turns) for group in first for episode in group.episodes}) > 1
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one.episodes, other.episodes, strict=True):
            assert [turn.text for turn in a.turns] == [turn.text for turn in b.turns]
            for x, y in zip(a.tokens, b.tokens, strict=True):
                np.testing.assert_array_equal(x.completion.logprobs_T, y.completion.logprobs_T)


class LooksOften(LooksTwice):
    """Every answer but the last is followed by one of the quarters."""

    max_turns = TURNS

    def reply(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message] | None:
        return super().reply(task, turns[: 1 + len(turns) % 4])


def ten_turns(family: str, cache: str) -> list[Group]:
    parts = tiny(family)
    engine = make_engine(parts, cache=cache, **({"page_tokens": 16} if cache == "paged" else {}))
    often = environment(LooksOften)
    return sampled(parts, engine, rows=1, n=1, asked=often, max_new_tokens=3)


@pytest.mark.parametrize("cache", ["dense", "paged"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_ten_turns_equal_transformers(family: str, cache: str) -> None:
    parts, groups = tiny(family), ten_turns(family, cache)
    (sample,) = batch_of(groups).samples
    assert len(sample.completion_ids) == TURNS
    assert len(sample.images) == TURNS - 1
    prompt = replace(groups[0].prompt, images=groups[0].prompt.images + sample.images)
    with torch.no_grad():
        expected_T = reference_logprobs(parts, prompt, sample.token_ids_T, TEMPERATURE)
    expected_A = expected_T[torch.from_numpy(sample.mask_T)]
    np.testing.assert_allclose(sample.rollout_logprobs_T[sample.mask_T], expected_A, atol=TOLERANCE)


def test_no_turn_is_blind() -> None:
    """Another picture in a turn's reply changes log-probs of the answers after it, and of none before."""
    groups = ten_turns("qwen3_vl", "dense")
    policy = make_policy(tiny("qwen3_vl"))

    def scored(groups: Sequence[Group]) -> np.ndarray:
        (sample,) = policy.compute_logprobs(batch_of(groups), Needs(old_logprobs=True)).samples
        assert sample.old_logprobs_T is not None
        return sample.old_logprobs_T[sample.mask_T]

    (episode,) = groups[0].episodes
    sound_A = scored(groups)
    for place in range(1, TURNS):
        turns, num_before = list(episode.turns), sum(len(t.completion.token_ids_T) for t in episode.tokens[:place])
        tokens = turns[place].tokens
        assert tokens is not None
        (picture,) = tokens.observation.images
        noise = {**picture.tensors, "pixel_values": -picture.tensors["pixel_values"]}
        other = replace(picture, tensors=noise, key=f"another {place}")
        turns[place] = replace(
            turns[place], tokens=replace(tokens, observation=replace(tokens.observation, images=(other,)))
        )
        changed = replace(groups[0], episodes=(replace(episode, turns=tuple(turns)),))
        found_A = scored([changed])
        np.testing.assert_allclose(found_A[:num_before], sound_A[:num_before], atol=TOLERANCE)
        assert np.abs(found_A - sound_A)[num_before:].max() > 10 * TOLERANCE, f"turn {place + 1} is blind"
