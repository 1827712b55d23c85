"""Every known fault in the engine of a tiny model: none passes the parity gate without being named."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.flat_positions import flat_positions
from benchmarks.parity_faults import FAULTS, POSITIONS, answer, main, read_with, rows_of, tiny_run
from fovea.run.parity import read_parity
from fovea_gym.utils.event_loop import wait_for


def test_each_fault_is_named_on_random_weights(tmp_path: Path) -> None:
    run = tiny_run(str(tmp_path), "qwen3_vl", "float32")
    assert wait_for(read_parity(run, 0)).passed
    answers = {fault: answer(read_with(run, fault), fault) for fault in FAULTS}
    assert answers == dict.fromkeys(FAULTS, "named")
    assert len(FAULTS) == 10
    assert wait_for(read_parity(run, 1)).passed, "the engine is as it was"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_none_passes_unnamed_before_and_after_a_warm_up(family: str, dtype: str) -> None:
    rows = list(rows_of(family, dtype, warmup_steps=40))
    assert len(rows) == 2
    assert not [row for row in rows if "PASSED" in row or "STOPPED" in row], "the sound engine passes"


def test_sound_runs_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--sound-runs", "1", "--families", "qwen3_vl", "--dtypes", "bfloat16"])
    assert "0 of 1 sound runs stopped" in capsys.readouterr().out


@pytest.mark.parametrize("name", POSITIONS)
def test_engine_and_trainer_have_the_same_wrong_positions(name: str, tmp_path: Path) -> None:
    run = tiny_run(str(tmp_path), "qwen3_vl", "float32")
    with flat_positions(name):
        flat = wait_for(read_parity(run, 0))
    sound = wait_for(read_parity(run, 0))
    assert (flat.passed, sound.passed) == (True, True)
    # of the trainer with this fault, as the gate imitates it
    gaps = [{fault.name: fault.faulty.mean_abs for fault in reading.faults}[name] for reading in (flat, sound)]
    assert gaps[0] < 1e-5 < 1e-4 < gaps[1]
