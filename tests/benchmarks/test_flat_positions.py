"""Wrong positions in trainer and engine alike, as a control."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.flat_positions import flat_positions
from benchmarks.parity_faults import POSITIONS, tiny_run
from fovea.run.parity import read_parity
from fovea.run.parity_reading import ParityReading
from fovea.utils.event_loop import wait_for


@pytest.mark.parametrize("name", POSITIONS)
def test_engine_and_trainer_have_the_same_wrong_positions(name: str, tmp_path: Path) -> None:
    run = tiny_run(str(tmp_path), "qwen3_vl", "float32")
    with flat_positions(name):
        flat = wait_for(read_parity(run, 0))
    sound = wait_for(read_parity(run, 0))
    assert flat.passed
    assert sound.passed
    # of the trainer with this fault, as the gate imitates it
    flat_gap, sound_gap = (gap_of(reading, name) for reading in (flat, sound))
    assert flat_gap < 1e-5 < 1e-4 < sound_gap


def gap_of(reading: ParityReading, name: str) -> float:
    (gap,) = [fault.faulty.mean_abs for fault in reading.faults if fault.name == name]
    return gap
