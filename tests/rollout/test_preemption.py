"""Completions that give their pages up and go on later are those of an engine with room for all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fovea.errors import EngineError
from fovea.models.activation_tape import Tape
from fovea.rollout.embedded import paged_cache, prefill, scheduler
from fovea.rollout.embedded.batch import DecodeBatch
from fovea.rollout.embedded.cache import Cache
from fovea.rollout.embedded.requests import KeptKeys, QueuedRequest, RemovedRow
from fovea.types import Completion, Prompt, Request, Sampling
from fovea_gym.utils.event_loop import wait_for
from tests.rollout.drawing import generate, keep_turns_of, make_engine, same, seeded
from tests.rollout.two_turns import assert_same_turns, sampled
from tests.tiny_models import mixed_prompts, tiny

PARTS = tiny("qwen3_vl")
PAGED: dict[str, Any] = {"cache": "paged", "page_tokens": 4}
COUNTS = [3, 5, 2, 4, 6]


def mixed_requests() -> tuple[list[Prompt], list[Sampling]]:
    """Completions of unequal lengths, by stop tokens, stop strings and limits."""
    samplings = [
        Sampling(max_new_tokens=30, seed=1, temperature=2.0),
        Sampling(max_new_tokens=40, seed=2, temperature=0.5, top_k=9),
        Sampling(max_new_tokens=43, seed=3, top_p=0.8, min_p=0.01, stop=("e", "un")),
        Sampling(max_new_tokens=37, seed=5, temperature=0),
        Sampling(max_new_tokens=40, seed=6, temperature=3.0, stop=("t",)),
    ]
    return (mixed_prompts(PARTS) * 2)[:5], samplings


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[RemovedRow]:
    """The rows that were preempted; admission leaves rows no room to grow, so that many are."""
    seen: list[RemovedRow] = []
    real = scheduler.resumption

    def noted(row: RemovedRow) -> QueuedRequest:
        seen.append(row)
        return real(row)

    monkeypatch.setattr(paged_cache, "GROWTH_TOKENS", 1)
    monkeypatch.setattr(scheduler, "resumption", noted)
    return seen


def largest_tokens(prompts: list[Prompt], samplings: list[Sampling]) -> int:
    """Cache tokens of the largest request at its worst case, in whole pages."""
    return max(
        p.num_tokens // 4 * 4 + n * (p.num_tokens % 4 + s.max_new_tokens + 3)
        for p, s, n in zip(prompts, samplings, COUNTS, strict=True)
    )


@pytest.mark.parametrize("decode_steps_per_wait", [1, 7])
def test_preempted_completions_are_those_of_an_engine_with_room(
    preempted: list[RemovedRow], decode_steps_per_wait: int
) -> None:
    prompts, samplings = mixed_requests()
    roomy = generate(make_engine(PARTS, **PAGED), prompts, samplings, COUNTS)
    assert not preempted
    engine = make_engine(
        PARTS, largest_tokens(prompts, samplings), decode_steps_per_wait=decode_steps_per_wait, **PAGED
    )
    for _ in range(2):  # a second time on what the first has left behind
        tight = generate(engine, prompts, samplings, COUNTS)
        assert all(same(a, b) for a, b in zip(roomy, tight, strict=True))
        assert len({row.row.completion_id for row in preempted}) > len(COUNTS)
        drawn_once = {c.id: c for group in tight for c in group}
        for row in preempted:  # what had been sampled stays, bit for bit
            completion, length = drawn_once[row.row.completion_id], len(row.token_ids_T)
            np.testing.assert_array_equal(completion.token_ids_T[:length], row.token_ids_T)
            np.testing.assert_array_equal(completion.logprobs_T[:length], row.logprobs_T)
        preempted.clear()


def test_the_youngest_is_preempted(preempted: list[RemovedRow], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine always has a row that is older, the oldest request never waits."""
    prompts, samplings = mixed_prompts(PARTS)[2:] * 4, seeded(4, max_new_tokens=40)
    before: list[tuple[str, int]] = []
    remove = DecodeBatch.remove

    def noted(self: DecodeBatch, indices: Sequence[int]) -> list[RemovedRow]:
        youngest = max((row.request.request.id, row.index) for row in self.rows)
        removed = remove(self, indices)
        if any(not row.stopped and len(row.token_ids_T) < 40 for row in removed):
            before.append(youngest)
        return removed

    monkeypatch.setattr(DecodeBatch, "remove", noted)
    generate(make_engine(PARTS, prompts[0].num_tokens + 3 * 40 + 16, **PAGED), prompts, samplings, 3)
    assert len(preempted) > 3
    assert [(row.row.request.request.id, row.row.index) for row in preempted] == before


@pytest.mark.parametrize("evicted", [True, False])
def test_later_turns_are_preempted_and_find_their_kept_keys_again(
    preempted: list[RemovedRow], monkeypatch: pytest.MonkeyPatch, evicted: bool
) -> None:
    restored: list[KeptKeys] = []
    real = prefill.restore

    def noted(cache: Cache, prompt: int, kept: KeptKeys | None) -> None:
        restored.extend([] if kept is None else [kept])
        real(cache, prompt, kept)

    monkeypatch.setattr(prefill, "restore", noted)
    roomy = sampled(PARTS, make_engine(PARTS, **PAGED))
    longest = max(
        group.prompt.num_tokens
        + sum(turn.observation.num_tokens + len(turn.completion.token_ids_T) for turn in e.tokens)
        for group in roomy
        for e in group.episodes
    )
    if not evicted:
        keep_turns_of(10**6, monkeypatch)
    tight = sampled(PARTS, make_engine(PARTS, 2 * longest, **PAGED))
    assert any(row.row.request.request.continues is not None for row in preempted)
    twice = len(restored) - len({id(kept) for kept in restored})
    assert (twice == 0) == evicted, "before a preemption and after it"
    assert_same_turns(roomy, tight)


def test_a_preempted_completion_keeps_the_vision_graph_of_its_prompt(preempted: list[RemovedRow]) -> None:
    """On a GPU the tape holds vision graphs alone, since linear outputs need every token to pass once, in order."""
    prompts, samplings = mixed_requests()
    tape = Tape([], 2**30, torch.float32)
    engine = make_engine(PARTS, largest_tokens(prompts, samplings), tape=tape, **PAGED)
    groups = generate(engine, prompts, samplings, COUNTS, for_update=True)
    assert preempted
    for prompt, group in zip(prompts, groups, strict=True):
        traces = [tape.trace(completion.id) for completion in group]
        assert all(trace is not None for trace in traces)
        (graph,) = {trace.graph_number for trace in traces if trace is not None}
        assert tape.graph(graph).keys() >= {image.key for image in prompt.images}


def test_a_failure_of_a_preempted_completion_reaches_every_caller(
    preempted: list[RemovedRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the caller whose request is admitted with it, in neither the queue nor the batch at that time."""
    prompt = mixed_prompts(PARTS)[0]
    # two of the prompts fit, and not all of their completions; the third waits for the end of the first
    engine = make_engine(PARTS, prompt.num_tokens * 2 + 24, **PAGED)

    def fail(*_: object) -> None:
        raise EngineError("no memory")

    monkeypatch.setattr(DecodeBatch, "resume", fail)

    async def ends() -> list[BaseException | Sequence[Completion]]:
        samplings = seeded(3, max_new_tokens=20)
        # for an update, so that equal prompts share no pages
        asked = [Request(id=str(i), prompt=prompt, sampling=s, for_update=True) for i, s in enumerate(samplings)]
        async with asyncio.timeout(20):
            return await asyncio.gather(*map(engine.generate, asked), return_exceptions=True)

    first, *others = wait_for(ends())
    assert not isinstance(first, BaseException)
    assert len(preempted) == 1
    assert [str(each) for each in others] == ["no memory"] * 2
