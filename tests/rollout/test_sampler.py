"""Top-k, top-p and min-p against transformers' warpers; inverse-CDF draws against the distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from fovea.rollout.embedded.sampler import _kept, draw, row_settings, uniforms
from fovea.types import Sampling

NOTHING_BANNED = torch.empty(0, dtype=torch.long)


def random_logits(rows: int = 64, vocabulary: int = 50) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"top_p": 1e-6},
    ],
)
def test_kept_tokens_equal_transformers_warpers(settings: dict[str, float]) -> None:
    logits = random_logits()
    warpers = LogitsProcessorList()
    if "top_k" in settings:
        warpers.append(TopKLogitsWarper(int(settings["top_k"])))
    if "top_p" in settings:
        warpers.append(TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        warpers.append(MinPLogitsWarper(settings["min_p"]))
    expected = torch.isfinite(warpers(None, logits))
    rows = row_settings([Sampling(max_new_tokens=1, **settings)] * len(logits), logits.device)  # type: ignore[arg-type]
    torch.testing.assert_close(_kept(logits.log_softmax(-1), rows), expected)


def test_frequencies_are_the_probabilities() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, -torch.inf]])
    n = 40_000
    rows = row_settings([Sampling(max_new_tokens=1, temperature=0.7)] * n, logits.device)
    u = torch.from_numpy(uniforms(3, 1, n)[0])
    tokens, logprobs = draw(logits.expand(n, -1), u, rows, torch.tensor([2]))
    counts = torch.bincount(tokens, minlength=5) / n
    allowed = (logits[0] / 0.7).index_fill(0, torch.tensor([2]), -torch.inf).softmax(-1)
    torch.testing.assert_close(counts, allowed, atol=0.01, rtol=0)
    assert counts[2] == counts[4] == 0
    torch.testing.assert_close(logprobs, (logits[0] / 0.7).log_softmax(-1)[tokens])


def test_the_ends_of_the_unit_interval_draw_tokens_that_have_probability() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 5.0, -torch.inf]]).repeat(2, 1)
    rows = row_settings([Sampling(max_new_tokens=1)] * 2, logits.device)
    u = torch.tensor([0.0, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert draw(logits, u, rows, NOTHING_BANNED)[0].tolist() == [1, 2]


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = random_logits(2)
    rows = row_settings([Sampling(max_new_tokens=1, temperature=0), Sampling(max_new_tokens=1)], logits.device)
    tokens, logprobs = draw(logits, torch.tensor([0.99, 0.0], dtype=torch.float64), rows, NOTHING_BANNED)
    assert tokens.tolist() == [int(logits[0].argmax()), 0]
    torch.testing.assert_close(logprobs[0], logits[0].log_softmax(-1).max())


def test_uniforms_depend_on_seed_and_place_alone() -> None:
    np.testing.assert_array_equal(uniforms(5, 8, 16)[:3], uniforms(5, 3, 16))
    assert not np.array_equal(uniforms(5, 1, 16), uniforms(6, 1, 16))
