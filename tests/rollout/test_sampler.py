"""Top-k, top-p and min-p against transformers' warpers; inverse-CDF draws against the distribution."""

from __future__ import annotations

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fovea.rollout.embedded.sampler import (
    Draw,
    inverse_cdf,
    inverse_cdf_plain,
    kept_tokens,
    needs_of,
    row_settings,
    sample_tokens,
    uniforms,
)
from fovea.types import Sampling
from gym_tests.tables import table

CPU = torch.device("cpu")
LAST = float(np.nextafter(1.0, 0.0))
EDGE = 1e-6
"""Sums of float32 probabilities are off by their rounding: so near to an edge of an interval either side is right."""


def draw_rows(
    logits: torch.Tensor, uniform: torch.Tensor, samplings: list[Sampling], banned: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    banned_K, needs = torch.tensor(banned, dtype=torch.long), needs_of(samplings)
    draw = Draw(uniform_B=uniform, settings=row_settings(samplings, CPU), needs=needs, banned_K=banned_K)
    return sample_tokens(logits.clone(), draw)


def random_logits(rows: int = 64, vocabulary: int = 50) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 3


@table(
    "settings",
    [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}, {"top_p": 1e-6}],
)
def test_kept_tokens_equal_transformers_warpers(settings: dict[str, float]) -> None:
    logits, warper = random_logits(), {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    warpers = LogitsProcessorList(warper[name](value) for name, value in settings.items())
    expected = torch.isfinite(warpers(None, logits))
    rows = row_settings([Sampling(max_new_tokens=1, **settings)] * len(logits), logits.device)  # type: ignore[arg-type]
    torch.testing.assert_close(kept_tokens(logits.log_softmax(-1), rows), expected)


@table("settings", [{"top_p": 1e-300}, {"temperature": 1e-300}, {"temperature": 1e-40}, {"min_p": 1.0}])
def test_settings_however_small_leave_the_likeliest_token(settings: dict[str, float]) -> None:
    logits = random_logits()
    likeliest = logits.index_fill(1, torch.tensor([2]), -torch.inf).argmax(-1)
    sampling = Sampling(max_new_tokens=1, **settings)  # type: ignore[arg-type]
    for uniform in (0.0, 0.5, LAST):
        u = torch.full((len(logits),), uniform, dtype=torch.float64)
        tokens, logprobs = draw_rows(logits, u, [sampling] * len(logits), (2,))
        assert tokens.tolist() == likeliest.tolist()
        assert torch.isfinite(logprobs).all()


def test_frequencies_are_the_probabilities() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, -torch.inf]])
    n = 40_000
    u = torch.from_numpy(uniforms(3, 1, n)[0])
    tokens, logprobs = draw_rows(logits.expand(n, -1), u, [Sampling(max_new_tokens=1, temperature=0.7)] * n, (2,))
    counts = torch.bincount(tokens, minlength=5) / n
    allowed = (logits[0] / 0.7).index_fill(0, torch.tensor([2]), -torch.inf).softmax(-1)
    torch.testing.assert_close(counts, allowed, atol=0.01, rtol=0)
    assert counts[2] == counts[4] == 0
    torch.testing.assert_close(logprobs, allowed.log()[tokens])


def test_the_ends_of_the_unit_interval_draw_tokens_that_have_probability() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 5.0, -torch.inf]]).repeat(2, 1)
    u = torch.tensor([0.0, LAST], dtype=torch.float64)
    assert draw_rows(logits, u, [Sampling(max_new_tokens=1)] * 2)[0].tolist() == [1, 2]


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = random_logits(2)
    samplings = [Sampling(max_new_tokens=1, temperature=0), Sampling(max_new_tokens=1)]
    tokens, logprobs = draw_rows(logits, torch.tensor([0.99, 0.0], dtype=torch.float64), samplings)
    assert tokens.tolist() == [int(logits[0].argmax()), 0]
    torch.testing.assert_close(logprobs[0], logits[0].log_softmax(-1).max())


def test_uniforms_depend_on_seed_and_place_alone() -> None:
    np.testing.assert_array_equal(uniforms(5, 8, 16)[:3], uniforms(5, 3, 16))
    assert not np.array_equal(uniforms(5, 1, 16), uniforms(6, 1, 16))


@table("vocabulary", [1, 2, 7, 50, 257, 4096, 32_768])
def test_every_number_draws_the_token_whose_interval_holds_it(vocabulary: int) -> None:
    probs = random_logits(1, vocabulary)[0].softmax(-1)
    ends = probs.double().cumsum(0) / probs.double().sum()
    grid = torch.linspace(0, 1, min(4001, 8_000_000 // vocabulary), dtype=torch.float64)[:-1]
    near = (grid[:, None] - ends[None]).abs().amin(1) < EDGE
    expected = torch.searchsorted(ends, grid, right=True).clamp(max=vocabulary - 1)
    rows = probs.expand(len(grid), -1)
    assert near.sum() < 0.2 * len(grid)
    assert (inverse_cdf(rows, grid)[~near] == expected[~near]).all()
    assert (inverse_cdf_plain(rows, grid)[~near] == expected[~near]).all()


def test_the_middle_of_every_interval_draws_its_token() -> None:
    probs = random_logits(1, 3000)[0].softmax(-1)
    ends = probs.double().cumsum(0) / probs.double().sum()
    middles = ends - 0.5 * probs.double()
    likely = (probs > 10 * EDGE).nonzero()[:, 0]
    assert len(likely) > 500
    assert inverse_cdf(probs.expand(len(likely), -1), middles[likely]).tolist() == likely.tolist()


def test_no_token_of_probability_zero_is_drawn_whatever_block_it_is_in() -> None:
    probs = torch.zeros(1, 1000)
    probs[0, [37, 38, 700, 981]] = torch.tensor([1e-30, 0.5, 1e-12, 0.5])
    u = torch.cat([torch.linspace(0, 1, 999, dtype=torch.float64)[:-1], torch.tensor([LAST], dtype=torch.float64)])
    sampled = inverse_cdf(probs.expand(len(u), -1), u)
    assert set(sampled.tolist()) <= {37, 38, 700, 981}
    assert (sampled[0], sampled[-1]) == (37, 981)


def test_many_draws_pass_a_chi_square_test() -> None:
    probs, n = random_logits(1, 300)[0].softmax(-1).double(), 200_000
    sampled = inverse_cdf(probs.float().expand(n, -1), torch.from_numpy(uniforms(11, 1, n)[0]))
    counts = torch.bincount(sampled, minlength=300).double()
    often = probs * n > 5
    expected = torch.cat([probs[often] * n, (probs[~often] * n).sum()[None]])
    seen = torch.cat([counts[often], counts[~often].sum()[None]])
    freedom = len(expected) - 1
    # Wilson and Hilferty: the cube root of a chi-square is nearly normal; 4 standard deviations
    bound = freedom * (1 - 2 / (9 * freedom) + 4 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert ((seen - expected) ** 2 / expected).sum() < bound


def test_rows_of_every_kind_share_a_batch() -> None:
    kinds: list[dict[str, float]] = [
        {},
        {"temperature": 0},
        {"temperature": 0.6, "top_k": 7},
        {"top_p": 0.8},
        {"temperature": 1.7, "min_p": 0.05},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
    ]
    samplings = [Sampling(max_new_tokens=1, **kind) for kind in kinds] * 20  # type: ignore[arg-type]
    logits, banned = random_logits(len(samplings), 900), (3, 77, 898, 899)
    u = torch.from_numpy(uniforms(2, 1, len(samplings))[0])
    tokens, logprobs = draw_rows(logits, u, samplings, banned)
    for row, sampling in enumerate(samplings):
        alone, logprob = draw_rows(logits[row : row + 1], u[row : row + 1], [sampling], banned)
        scaled = logits[row : row + 1] / (sampling.temperature or 1)
        expected = SuppressTokensLogitsProcessor(banned)(None, scaled)[0].log_softmax(-1)[tokens[row]]
        assert tokens[row] == alone[0]
        assert tokens[row] not in banned
        torch.testing.assert_close(logprobs[row], expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(logprob[0], expected, atol=1e-6, rtol=0)
