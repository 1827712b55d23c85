"""States of delta nets in the embedded engine: no way of running rows changes a completion, and they are counted."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fovea.models.decoder import decoder_shape
from fovea.types import Completion
from tests.rollout.drawing import generate, keep_turns_of, make_engine, mixed_requests, noted_rows, noted_turns, same
from tests.rollout.two_turns import assert_same_turns, sampled
from tests.tiny_models import tiny

PARTS = tiny("qwen3_5", num_layers=4)
COUNTS = [2, 5, 1, 4, 3, 2]


@pytest.fixture(scope="module")
def alone() -> list[list[Completion]]:
    requests = zip(*mixed_requests(PARTS, len(COUNTS)), COUNTS, strict=True)
    return [list(generate(make_engine(PARTS), [p], [s], n)[0]) for p, s, n in requests]


@pytest.mark.parametrize(("tight", "pass_tokens"), [(True, 11), (False, 16_384)])
def test_no_way_of_running_changes_a_completion(
    alone: list[list[Completion]], tight: bool, pass_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that wait, chunks of prompts, rows that move, and more steps between syncs than states allow."""
    states = decoder_shape(PARTS.network.config.text_config).state_tokens(4)
    requests = zip(*mixed_requests(PARTS, len(COUNTS)), COUNTS, strict=True)
    longest = max(p.num_tokens + n * (s.max_new_tokens + states) for p, s, n in requests)
    budget = longest + 100 if tight else 200_000
    engine = make_engine(PARTS, budget, pass_tokens=pass_tokens, decode_steps_per_wait=7)
    rows = noted_rows(monkeypatch)
    together = generate(engine, *mixed_requests(PARTS, len(COUNTS)), COUNTS)
    assert all(same(a, b) for a, b in zip(alone, together, strict=True))
    joined_while_others_ran = any(before < after for before, after in pairwise(rows))
    assert joined_while_others_ran == tight


def test_turns_are_kept_by_the_memory_of_keys_and_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of fewer tokens than a turn takes keeps none, and the same is sampled."""
    shape = decoder_shape(PARTS.network.config.text_config)
    engine = make_engine(PARTS)
    kept = noted_turns(monkeypatch)
    groups = sampled(PARTS, engine)
    assert kept
    for each, _ in kept:
        states = [x for state in each.states for x in (state.tail_RKC, state.memory_RVDF)]
        held = sum(x.nbytes for x in (*each.layers, *states))
        assert held <= each.cost_tokens * shape.token_bytes(4) < held + shape.token_bytes(4)
    keep_turns_of(min(each.cost_tokens for each, _ in kept) - 1, monkeypatch)
    kept.clear()
    assert_same_turns(groups, sampled(PARTS, make_engine(PARTS)))
    assert not any(number for _, number in kept)
