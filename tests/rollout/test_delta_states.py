"""States of delta nets in the embedded engine: no way of running rows changes a completion, and they are counted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from fovea.models.decoder import decoder_shape
from fovea.rollout.embedded.batch import DecodeBatch
from fovea.rollout.embedded.requests import KeptKeys
from fovea.types import Completion
from fovea_gym.utils.lru_cache import LRUCache
from tests.rollout.drawing import generate, keep_turns_of, make_engine, mixed_requests, same
from tests.rollout.two_turns import drawn
from tests.tiny_models import tiny

PARTS = tiny("qwen3_5", num_layers=4)
COUNTS = [2, 5, 1, 4, 3, 2]


@pytest.fixture(scope="module")
def alone() -> list[list[Completion]]:
    requests = zip(*mixed_requests(PARTS, len(COUNTS)), COUNTS, strict=True)
    return [list(generate(make_engine(PARTS), [p], [s], n)[0]) for p, s, n in requests]


def running(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each decode step, to which requests are added while others run."""
    rows: list[int] = []
    step = DecodeBatch.step

    def counted(self: DecodeBatch, *arguments: Any) -> None:
        rows.append(len(self))
        step(self, *arguments)

    monkeypatch.setattr(DecodeBatch, "step", counted)
    return rows


@pytest.mark.parametrize(("tight", "pass_tokens"), [(True, 11), (False, 16_384)])
def test_no_way_of_running_changes_a_completion(
    alone: list[list[Completion]], tight: bool, pass_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that wait, chunks of prompts, rows that move, and more steps between syncs than states allow."""
    states = decoder_shape(PARTS.network.config.text_config).state_tokens(4)
    requests = zip(*mixed_requests(PARTS, len(COUNTS)), COUNTS, strict=True)
    longest = max(p.num_tokens + n * (s.max_new_tokens + states) for p, s, n in requests)
    budget = longest + 100 if tight else 200_000
    engine = make_engine(PARTS, budget, pass_tokens=pass_tokens, decode_steps_per_sync=7)
    rows = running(monkeypatch)
    together = generate(engine, *mixed_requests(PARTS, len(COUNTS)), COUNTS)
    assert all(same(a, b) for a, b in zip(alone, together, strict=True))
    joined_while_others_ran = any(before < after for before, after in pairwise(rows))
    assert joined_while_others_ran == tight


def test_turns_are_kept_by_the_memory_of_keys_and_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of fewer tokens than a turn takes keeps none, and the same is drawn."""
    shape = decoder_shape(PARTS.network.config.text_config)
    engine = make_engine(PARTS)
    kept: list[KeptKeys] = []
    put = LRUCache.put

    def noted(self: LRUCache[Any, Any], key: object, value: object, num_bytes: int) -> None:
        kept.extend([value] if isinstance(value, KeptKeys) else [])
        put(self, key, value, num_bytes)

    monkeypatch.setattr(LRUCache, "put", noted)
    groups = drawn(PARTS, engine)
    for each in kept:
        states = [x for state in each.states for x in (state.tail_RKC, state.memory_RVDF)]
        held = sum(x.nbytes for x in (*each.layers, *states))
        assert held <= each.cost_tokens * shape.token_bytes(4) < held + shape.token_bytes(4)
    keep_turns_of(min(each.cost_tokens for each in kept) - 1, monkeypatch)
    kept.clear()
    again = drawn(PARTS, make_engine(PARTS))
    assert not kept
    for one, other in zip(groups, again, strict=True):
        for first, second in zip(one.episodes, other.episodes, strict=True):
            assert same([x.completion for x in first.tokens], [x.completion for x in second.tokens])
