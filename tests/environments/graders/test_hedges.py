"""Hedges on the rows that `fovea data vqa` makes."""

from __future__ import annotations

import numpy as np

from fovea_tools.data_sets.vqa import QUESTION_TYPES, ask
from gym_tests.graders.hedges import check_constants


def test_no_blind_hedge_beats_the_best_blind_answer_on_made_rows() -> None:
    rng = np.random.default_rng(0)
    check_constants([ask(kind, turn, rng).answer for kind in QUESTION_TYPES for turn in range(120)])
