"""However rows are batched, refilled, cached and cut into passes: the same completions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fovea.errors import EngineError
from fovea.types import Completion, Sampling
from tests.rollout.drawing import generate, make_engine, mixed_requests, noted_rows, same, seeded
from tests.tiny_models import mixed_prompts, tiny

PARTS = tiny("qwen3_vl")
COUNTS = [2, 5, 1, 4, 3, 4, 2, 1, 6]
TIGHT = 330
"""Two or three of the requests below at a time."""


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """Each request in a separate engine, on the plainest way."""
    requests = zip(*mixed_requests(PARTS), COUNTS, strict=True)
    return [generate(make_engine(PARTS), [p], [s], n)[0] for p, s, n in requests]


@pytest.mark.parametrize("budget", [TIGHT, 10_000])
@pytest.mark.parametrize("decode_steps_per_wait", [1, 7])
@pytest.mark.parametrize("pass_tokens", [11, 16_384])
@pytest.mark.parametrize("cache", ["dense", "paged"])
def test_no_way_of_running_changes_a_completion(
    alone: list[list[Completion]], budget: int, decode_steps_per_wait: int, pass_tokens: int, cache: str
) -> None:
    tuning = {
        "decode_steps_per_wait": decode_steps_per_wait,
        "pass_tokens": pass_tokens,
        "cache": cache,
        "page_tokens": 16,
    }
    engine = make_engine(PARTS, budget + 16 * sum(COUNTS) * (cache == "paged"), **tuning)
    for _ in range(2):  # a second time on what the first has left behind
        together = generate(engine, *mixed_requests(PARTS), COUNTS)
        assert all(same(a, b) for a, b in zip(alone, together, strict=True))


@pytest.fixture
def rows_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return noted_rows(monkeypatch)


def test_only_completions_that_run_are_decoded(rows_run: list[int]) -> None:
    prompts, samplings = mixed_requests(PARTS)
    groups = generate(make_engine(PARTS), prompts, samplings, COUNTS)
    lengths = [len(completion.token_ids_T) for group in groups for completion in group]
    expected = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    assert rows_run == expected


def test_a_request_moves_up_as_soon_as_there_is_room(rows_run: list[int]) -> None:
    """Of two requests that do not fit together, the second joins while the first's longest completion runs."""
    prompt = mixed_prompts(PARTS)[2]
    first, second = (Sampling(max_new_tokens=100, seed=seed, stop=("e",)) for seed in (1, 3))
    budget = 8 * 100 + 2 * prompt.num_tokens
    groups = generate(make_engine(PARTS, budget), [prompt] * 2, [first, second], [8, 4])
    lengths = [sorted(len(c.token_ids_T) for c in group) for group in groups]
    starts = next(step for step in range(1, 101) if sum(length > step for length in lengths[0]) <= 4)
    assert starts < lengths[0][-1], "the first request has completions of different length"
    assert len(rows_run) == max(lengths[0][-1] - 1, starts + lengths[1][-1] - 2)


def test_the_budget_bounds_what_runs(rows_run: list[int]) -> None:
    prompt = mixed_prompts(PARTS)[2]
    budget = 2 * (prompt.num_tokens + 3 * 10)
    generate(make_engine(PARTS, budget), [prompt] * 5, seeded(5, max_new_tokens=10), 3)
    assert max(rows_run) == 6


def test_bfloat16_runs_in_every_cache() -> None:
    parts = tiny("qwen3_vl")
    parts.network.bfloat16()
    prompts, samplings = mixed_prompts(parts), seeded(3, max_new_tokens=8)
    slots, pages = (
        generate(make_engine(parts, cache=cache, page_tokens=16), prompts, samplings, 3) for cache in ("dense", "paged")
    )
    for a, b in zip(slots, pages, strict=True):
        for one, other in zip(a, b, strict=True):
            assert one.logprobs_T.dtype == other.logprobs_T.dtype == "float32"
            # rounding differs between the caches: only the first token is sure to be sampled from the same logits
            assert one.token_ids_T[0] == other.token_ids_T[0]


def test_weights_that_are_not_finite_are_an_error() -> None:
    parts = tiny("qwen3_vl")
    with torch.no_grad():
        next(parts.network.get_submodule("model.language_model.norm").parameters()).fill_(torch.nan)
    with pytest.raises(EngineError, match="not finite"):
        generate(make_engine(parts), mixed_prompts(parts)[:1], [Sampling(max_new_tokens=3)], 2)
