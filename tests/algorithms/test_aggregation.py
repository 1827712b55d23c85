"""Weights of completions against the padded mask, for any split, and the sums over packed completions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.algorithms.aggregation import Aggregation, sample_weights
from fovea.algorithms.ratio import sequence_means, sequence_sums, spread

MODES: list[Aggregation] = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 4, 1 / 4, 1 / 4]),  # 1 + 0 + 3 actions
        ("seq-mean-token-mean", [1 / 3, 1 / 3, 1 / 9]),  # 3 rows; the second has nothing to weigh
        ("seq-mean-token-sum", [1 / 3, 1 / 3, 1 / 3]),
        ("seq-mean-token-sum-norm", [1 / 30, 1 / 30, 1 / 30]),  # 3 rows of at most 10
    ],
)
def test_weights_by_hand(mode: Aggregation, expected: list[float]) -> None:
    assert sample_weights(mode, [1, 0, 3], max_response_tokens=10).tolist() == pytest.approx(expected)


def padded(mode: Aggregation, losses_BT: np.ndarray, mask_BT: np.ndarray, longest: int) -> float:
    """The four aggregations as they are written over a padded batch."""
    sums_B, counts_B = (losses_BT * mask_BT).sum(1), mask_BT.sum(1)
    if mode == "token-mean":
        return float(sums_B.sum() / max(counts_B.sum(), 1))
    if mode == "seq-mean-token-mean":
        return float(np.mean([s / n if n else 0.0 for s, n in zip(sums_B, counts_B, strict=True)]))
    if mode == "seq-mean-token-sum":
        return float(sums_B.mean())
    return float(sums_B.sum() / (len(sums_B) * longest))


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8), cut=st.integers(0, 8), seed=st.integers(0, 99))
def test_weighted_sums_equal_the_padded_batch_for_any_split(
    mode: Aggregation, lengths: list[int], cut: int, seed: int
) -> None:
    losses = np.random.default_rng(seed).normal(size=(len(lengths), 12))
    mask = np.arange(12)[None] < np.array(lengths)[:, None]
    weights = sample_weights(mode, lengths, max_response_tokens=12)
    sums = [float(row[:n].sum()) for row, n in zip(losses, lengths, strict=True)]
    products = [w * s for w, s in zip(weights.tolist(), sums, strict=True)]
    assert sum(products[:cut]) + sum(products[cut:]) == pytest.approx(padded(mode, losses, mask, 12), abs=1e-12)


def test_no_completions_and_no_actions_are_not_an_error() -> None:
    for mode in MODES:
        assert sample_weights(mode, [], max_response_tokens=4).tolist() == []
        assert np.isfinite(sample_weights(mode, [0, 0], max_response_tokens=4)).all()


def test_sums_means_and_spread_by_hand() -> None:
    x, lengths = torch.tensor([1.0, 2.0, 3.0, 10.0]), [3, 0, 1]
    assert sequence_sums(x, lengths).tolist() == [6.0, 0.0, 10.0]
    assert sequence_means(x, lengths).tolist() == [2.0, 0.0, 10.0]
    assert spread(torch.tensor([7.0, 8.0, 9.0]), lengths).tolist() == [7.0, 7.0, 7.0, 9.0]
    assert sequence_sums(x[:0], []).tolist() == sequence_means(x[:0], []).tolist() == spread(x[:0], []).tolist() == []


def test_sequence_helpers_have_gradients() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 10.0], requires_grad=True)
    weights = torch.tensor([6.0, 5.0, 4.0])
    (sequence_means(x, [3, 0, 1]) * weights).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0, 4.0]
    s = torch.tensor([7.0, 8.0, 9.0], requires_grad=True)
    spread(s, [3, 0, 1]).sum().backward()
    assert s.grad is not None
    assert s.grad.tolist() == [3.0, 0.0, 1.0]


def test_lengths_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(RuntimeError):
        sequence_sums(torch.zeros(4), [3])
