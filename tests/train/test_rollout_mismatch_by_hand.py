"""The figures of engine against trainer, of three tokens in two completions."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest

from fovea.train.update_metrics import mismatch
from fovea.types import Prompt, Sample, SampleGroup
from tests.records import all_actions

PROMPT = Prompt(token_ids_L=np.arange(3), unexpanded_ids_U=np.arange(3))


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def group(*rollout: np.ndarray) -> SampleGroup:
    samples = (
        Sample(token_ids_T=np.arange(len(x)), mask_T=all_actions(len(x)), rollout_logprobs_T=x, reward=0.0, weight=1.0)
        for x in rollout
    )
    return SampleGroup(prompt=PROMPT, samples=tuple(samples))


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_by_hand(sign: int) -> None:
    """lp - lp_old is 0.5, -2 and 0.3 (or all the other way): the largest of either sign counts."""
    off = [sign * 0.5, sign * -2.0, sign * 0.3]
    old = [floats(-1, -3), floats(-2)]
    found = mismatch([group(floats(-1 + off[0], -3 + off[1])), group(floats(-2 + off[2]))], old)
    assert found == pytest.approx(
        {
            "rollout_train_k1": sign * -1.2 / 3,
            "rollout_train_kl": sum(exp(-x) + x - 1 for x in off) / 3,
            "rollout_train_abs": 2.8 / 3,
            "rollout_train_max": 2.0,
        },
        rel=1e-5,
    )


def test_of_no_groups_there_is_nothing_to_say() -> None:
    assert mismatch([], []) == {}
