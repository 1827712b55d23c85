"""Geometry of boxes: hand-computed numbers, a raster, assignments by brute force."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from numpy.typing import NDArray

from fovea_gym.environments.grounding.geometry import (
    Box,
    average_precision,
    best_pairs,
    giou,
    iou,
    is_inside,
    most_pairs,
)

SAME = 1e-6


def random_boxes(rng: np.random.Generator, count: int, side: int) -> list[Box]:
    corners = rng.integers(0, side, (count, 2))
    sizes = rng.integers(1, side, (count, 2))
    return [(float(x), float(y), float(x + w), float(y + h)) for (x, y), (w, h) in zip(corners, sizes, strict=True)]


def raster(box: Box, side: int) -> NDArray[np.bool_]:
    """The cells of a grid that a box of whole numbers covers."""
    cells_YX = np.zeros((side, side), dtype=bool)
    left, top, right, bottom = map(int, box)
    cells_YX[top:bottom, left:right] = True
    return cells_YX


def test_hand_computed() -> None:
    assert iou([(0, 0, 2, 2)], [(1, 1, 3, 3)])[0, 0] == pytest.approx(1 / 7)
    # the hull is 3 x 3, of which 2 cells are in neither box
    assert giou([(0, 0, 2, 2)], [(1, 1, 3, 3)])[0, 0] == pytest.approx(1 / 7 - 2 / 9)
    assert giou([(0, 0, 1, 1)], [(9, 9, 10, 10)])[0, 0] == pytest.approx(-0.98)
    assert iou([(1, 1, 1, 1)], [(1, 1, 1, 1)])[0, 0] == 0
    assert iou([], [(0, 0, 1, 1)]).shape == (0, 1)
    assert is_inside((0, 1), (0, 0, 1, 1))
    assert not is_inside((0, 1.01), (0, 0, 1, 1))


def test_equal_to_a_raster() -> None:
    """Cells counted one by one; the hull is the raster of the extreme cells."""
    rng = np.random.default_rng(0)
    ours, theirs = random_boxes(rng, 40, 20), random_boxes(rng, 40, 20)
    shares, general = iou(ours, theirs), giou(ours, theirs)
    for row, one in enumerate(ours):
        for column, other in enumerate(theirs):
            a, b = raster(one, 40), raster(other, 40)
            both, either = (a & b).sum(), (a | b).sum()
            ys, xs = np.nonzero(a | b)
            hull = (ys.max() - ys.min() + 1) * (xs.max() - xs.min() + 1)
            assert abs(shares[row, column] - both / either) < SAME
            assert abs(general[row, column] - (both / either - (hull - either) / hull)) < SAME


def test_iou_is_the_same_in_shares_of_a_picture() -> None:
    rng = np.random.default_rng(2)
    ours, theirs = random_boxes(rng, 20, 500), random_boxes(rng, 20, 500)
    size = np.array([640, 333, 640, 333])
    shares = iou((np.array(ours) / size).tolist(), (np.array(theirs) / size).tolist())
    assert np.abs(shares - iou(ours, theirs)).max() < 1e-12


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (2, 5), (5, 2), (4, 6), (0, 3), (3, 0)])
def test_the_best_pairs_are_those_of_all_permutations(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    for _ in range(30):
        # many ties, as IoU of boxes apart is 0
        values_NM = rng.random(shape) * (rng.random(shape) < 0.5)
        wide = values_NM if shape[0] <= shape[1] else values_NM.T
        best = max(
            sum(wide[row, column] for row, column in enumerate(columns))
            for columns in permutations(range(wide.shape[1]), wide.shape[0])
        )
        pairs = best_pairs(values_NM)
        assert len(pairs) == min(shape)
        assert len({row for row, _ in pairs}) == len({column for _, column in pairs}) == min(shape)
        assert sum(values_NM[pair] for pair in pairs) == pytest.approx(best)
        hits_NM = values_NM > 0
        assert most_pairs(hits_NM) == sum(hits_NM[pair] for pair in best_pairs(hits_NM.astype(float)))


def test_average_precision_of_a_picture() -> None:
    def ap(hits: list[list[int]]) -> float:
        return average_precision(np.array(hits, dtype=bool), np.array(hits, dtype=float))

    assert ap([[1, 0], [0, 1]]) == 1
    # right, wrong, right: precision 1 up to recall .5 (51 recalls), 2/3 after it (50)
    assert ap([[1, 0], [0, 0], [0, 1]]) == pytest.approx((51 + 50 * 2 / 3) / 101)
    assert ap([[1, 0], [1, 0]]) == pytest.approx(51 / 101)
    assert ap([[0], [1]]) == pytest.approx(0.5)
    empty = np.zeros((0, 2))
    assert (average_precision(empty > 0, empty), average_precision(empty.T > 0, empty.T)) == (0, 0)
    assert average_precision(np.zeros((0, 0), dtype=bool), np.zeros((0, 0))) == 1
