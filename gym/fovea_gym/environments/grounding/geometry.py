"""Boxes in the plane: IoU, generalised IoU, matching, average precision.

A box is (left, top, right, bottom), in any unit, since IoU does not depend on the scale of an axis. Axes: `N` answers,
`M` true boxes, `4` sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Box: TypeAlias = tuple[float, float, float, float]
Point: TypeAlias = tuple[float, float]
_RECALLS = np.linspace(0, 1, 101)
"""Recalls at which COCO evaluates precision."""


def iou(boxes_N4: Sequence[Box], others_M4: Sequence[Box]) -> NDArray[np.float64]:
    """Intersection over union of every pair, `[N, M]`; 0 if both boxes are empty."""
    overlap_NM, union_NM, _ = _areas(boxes_N4, others_M4)
    return np.divide(overlap_NM, union_NM, out=np.zeros_like(union_NM), where=union_NM > 0)


def giou(boxes_N4: Sequence[Box], others_M4: Sequence[Box]) -> NDArray[np.float64]:
    """Generalised IoU of every pair, `[N, M]`, from -1 to 1 (Rezatofighi et al., arXiv 1902.09630)."""
    overlap_NM, union_NM, hull_NM = _areas(boxes_N4, others_M4)
    share_NM = np.divide(overlap_NM, union_NM, out=np.zeros_like(union_NM), where=union_NM > 0)
    return share_NM - np.divide(hull_NM - union_NM, hull_NM, out=np.zeros_like(union_NM), where=hull_NM > 0)


def _areas(boxes_N4: Sequence[Box], others_M4: Sequence[Box]) -> tuple[NDArray[np.float64], ...]:
    """Areas of intersection, union and smallest enclosing box of every pair."""
    ours_N14 = np.asarray(boxes_N4, dtype=np.float64).reshape(-1, 1, 4)
    theirs_1M4 = np.asarray(others_M4, dtype=np.float64).reshape(1, -1, 4)
    near, far = np.maximum(ours_N14, theirs_1M4), np.minimum(ours_N14, theirs_1M4)
    overlap_NM = np.clip(far[..., 2] - near[..., 0], 0, None) * np.clip(far[..., 3] - near[..., 1], 0, None)
    hull_NM = (near[..., 2] - far[..., 0]) * (near[..., 3] - far[..., 1])
    return overlap_NM, _area(ours_N14) + _area(theirs_1M4) - overlap_NM, hull_NM


def _area(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    area: NDArray[np.float64] = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
    return area


def centre(box: Box) -> Point:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def is_inside(point: Point, box: Box) -> bool:
    """True if a point is in a box or on its edge."""
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]


def best_pairs(values_NM: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Pairs of rows and columns with the largest sum of values; each row and column is in at most one pair.

    The Hungarian method with potentials, in O(min(N, M)^2 * max(N, M)).
    """
    if values_NM.shape[0] > values_NM.shape[1]:
        return sorted((row, column) for column, row in best_pairs(values_NM.T))
    num_rows, num_columns = values_NM.shape
    # the last column is the start of every search for a free column
    row_of = np.full(num_columns + 1, -1)
    rows, columns = np.zeros(num_rows), np.zeros(num_columns + 1)
    for row in range(num_rows):
        row_of[num_columns] = row
        best, came_from = np.full(num_columns, np.inf), np.full(num_columns, num_columns)
        is_seen = np.zeros(num_columns + 1, dtype=bool)
        at = num_columns
        while row_of[at] >= 0:
            is_seen[at] = True
            slack = -values_NM[row_of[at]] - rows[row_of[at]] - columns[:-1]
            is_better = ~is_seen[:-1] & (slack < best)
            best[is_better], came_from[is_better] = slack[is_better], at
            free = np.where(is_seen[:-1], np.inf, best)
            following = int(free.argmin())
            step = free[following]
            rows[row_of[is_seen]] += step
            columns[is_seen] -= step
            best[~is_seen[:-1]] -= step
            at = following
        while at != num_columns:
            row_of[at] = row_of[came_from[at]]
            at = int(came_from[at])
    return sorted((int(row), column) for column, row in enumerate(row_of[:-1]) if row >= 0)


def most_pairs(hits_NM: NDArray[np.bool_]) -> int:
    """The largest number of hits with each row and column in at most one pair, found with augmenting paths."""
    columns_of = [np.flatnonzero(hits_M).tolist() for hits_M in hits_NM]
    row_of: dict[int, int] = {}

    def is_placed(row: int, tried: set[int]) -> bool:
        for column in columns_of[row]:
            if column not in tried:
                tried.add(column)
                if column not in row_of or is_placed(row_of[column], tried):
                    row_of[column] = row
                    return True
        return False

    return sum(is_placed(row, set()) for row in range(len(columns_of)))


def average_precision(hits_NM: NDArray[np.bool_], values_NM: NDArray[np.float64]) -> float:
    """COCO's average precision of one picture, at 101 recalls, with the answers ranked by their order.

    Each answer takes, of the free true boxes that it hits, the one with the largest value. The result is 1 if there is
    neither an answer nor a true box.
    """
    num_answers, num_true = hits_NM.shape
    if not num_answers or not num_true:
        return float(num_answers == num_true)
    is_free, is_right = np.ones(num_true, dtype=bool), np.zeros(num_answers, dtype=bool)
    for answer in range(num_answers):
        scores = np.where(hits_NM[answer] & is_free, values_NM[answer], -np.inf)
        best = int(scores.argmax())
        is_right[answer] = scores[best] > -np.inf
        is_free[best] &= not is_right[answer]
    num_right = is_right.cumsum()
    precision = num_right / np.arange(1, num_answers + 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    place = np.searchsorted(num_right / num_true, _RECALLS, side="left")
    return float(np.append(precision, 0.0)[place].mean())
