"""Statistics of the comparison with TRL, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.cases import CASES, endless, make_parts
from benchmarks.timing import Speedup, StepTimes, shown_ratio, with_plain_share


def test_the_three_ratios_by_hand() -> None:
    """The machine halved its speed in the second pair, and disturbed the third of ours only."""
    speedup = Speedup.of(slow=[10, 20, 12], fast=[2, 4, 6])
    assert speedup == Speedup(of_medians=12 / 4, paired=5, of_best=5)


@pytest.mark.parametrize(
    ("ratio", "spreads", "shown"),
    [(4.74, (0.1, 0.2), "4.7x"), (4.74, (0.1, 0.21), "5x"), (12.93, (0.3, 0), "10x"), (0.957, (0, 0), "0.96x")],
)
def test_a_large_spread_takes_the_second_digit(ratio: float, spreads: tuple[float, float], shown: str) -> None:
    assert shown_ratio(ratio, spreads) == shown


def test_one_plain_update_in_fifty_counts() -> None:
    usual = StepTimes(step=7.0, rollout=3.0, train=4.0, tokens=8.0)
    mean = with_plain_share(usual, StepTimes(step=12.0, rollout=3.0, train=9.0, tokens=8.0), every_steps=50)
    assert (mean.step, mean.rollout, mean.train) == pytest.approx((7.1, 3.0, 4.1))


@pytest.mark.parametrize("name", ["tiny", "image_heavy"])
def test_all_ids_of_a_case_can_be_drawn_but_special_ones(name: str) -> None:
    parts = endless(make_parts(CASES[name]))
    vocabulary = parts.network.get_input_embeddings().num_embeddings
    assert vocabulary == len(parts.processor.tokenizer) == (CASES[name].vocabulary or vocabulary)
    assert len(parts.processor.banned_ids) < 20
    assert np.isin(vocabulary - 1, parts.processor.banned_ids) == (name == "tiny")
