"""Pushes to an engine that holds a copy of the weights: two rows are compared after each, and a lost push is found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fovea.errors import ParityError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.run.parity_faults import TakenPush
from fovea.types import Prompt, Sample, SampleGroup
from tests.run.copying import SETTINGS, copying_run
from tests.runs import untimed
from tests.wiring.small import run_of


def test_a_run_with_copies_is_checked_at_each_push_and_left_as_it_is(tmp_path: Path) -> None:
    shared, copied = tmp_path / "shared", tmp_path / "copied"
    train(run_of(shared, **SETTINGS))
    run = copying_run(copied)
    train(run)
    assert run.taken_push.version == 3, "each push was told from the one before"
    assert all("seconds/parity" in row for row in read_metrics(copied))
    assert not any("seconds/parity" in row for row in read_metrics(shared))
    about_pushes = {"transfer/weights_mib", "weights_checksum"}
    rows = [[{k: v for k, v in row.items() if k not in about_pushes} for row in untimed(f)] for f in (shared, copied)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("lost_from", [1, 2])
def test_a_push_that_the_engine_lost_is_named(lost_from: int, tmp_path: Path) -> None:
    named = rf"(?s)after the push of version {lost_from}, .*this fault: the weights of version {lost_from - 1} \("
    with pytest.raises(ParityError, match=named):
        train(copying_run(tmp_path, lost_from=lost_from))


def group_of(*completions: tuple[list[int], list[float]]) -> SampleGroup:
    samples = [
        Sample(
            token_ids_T=np.array(ids),
            mask_T=np.ones(len(ids), dtype=np.bool_),
            rollout_logprobs_T=np.float32(logprobs),
            reward=0,
            weight=0,
        )
        for ids, logprobs in completions
    ]
    ids = np.array([1])
    return SampleGroup(prompt=Prompt(token_ids_L=ids, unexpanded_ids_U=ids), samples=tuple(samples))


def test_tokens_are_compared_as_far_as_both_draws_are_equal() -> None:
    push = TakenPush()
    push.remember(7, [group_of(([1, 2, 3], [0, 0, 0]), ([4], [0]))], [np.float32([-1, -2, -3, -4])])
    later = group_of(([1, 2, 9, 9], [-0.1, -0.2, -0.3, -0.4]), ([5, 6], [-0.5, -0.6]))
    ((engine_A, sound_A, stale_A),) = push.beside([later], [np.float32([-11, -12, -13, -14, -15, -16])])
    assert engine_A.tolist() == pytest.approx([-0.1, -0.2])
    assert sound_A.tolist() == [-11, -12]
    assert stale_A.tolist() == [-1, -2]
