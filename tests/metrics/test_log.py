"""The file of metrics, times, waits and memory of phases, and `profile=true`."""

from __future__ import annotations

import ctypes
import gc
import gzip
import json
import math
import mmap
import os
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch

from fovea.metrics.log import JsonlSink, MetricsLog, Phases, peak_rss_gib, read_metrics
from fovea.metrics.profile import phase_times, timed_steps, traced_step
from fovea.utils.host_waits import awaited
from fovea_gym.errors import DataError
from fovea_gym.utils.files import write_atomically
from tests.runs import QUICK, fovea_here


def log_steps(sink, steps) -> None:
    with MetricsLog([sink]) as log:
        for step in steps:
            log.write(step, {"reward": step / 8, "groups/with_signal": float(step)})


def test_every_sink_gets_every_step_and_is_closed() -> None:
    first, second = Mock(), Mock()
    with MetricsLog([first, second]) as log:
        log.write(3, {"reward": 0.5})
    assert first.mock_calls == second.mock_calls == [call.write(3, {"reward": 0.5}), call.close()]


def test_a_line_is_valid_json_with_the_step_first(tmp_path: Path) -> None:
    metrics = {"reward": 0.5, "loss": math.nan, "grad_norm": math.inf, "steps": 4}
    with MetricsLog([JsonlSink(tmp_path)]) as log:
        log.write(7, metrics)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 7, "reward": 0.5, "loss": null, "grad_norm": null, "steps": 4.0}\n'
    read = {"step": 7, **metrics, "loss": math.nan, "grad_norm": math.nan}
    assert read_metrics(tmp_path) == [pytest.approx(read, nan_ok=True)]


def test_lines_survive_a_process_that_dies(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from fovea.metrics.log import JsonlSink\n"
        "sink = JsonlSink(Path(sys.argv[1])); sink.write(1, {'reward': 0.5}); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    assert read_metrics(tmp_path) == [{"step": 1, "reward": 0.5}]


def test_a_log_that_nobody_closes_leaves_no_open_file(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        JsonlSink(tmp_path).write(1, {"reward": 0.5})
        gc.collect()
    assert not [each for each in seen if "metrics.jsonl" in str(each.message)]


def test_a_resumed_file_equals_that_of_a_run_never_stopped(tmp_path: Path) -> None:
    log_steps(JsonlSink(tmp_path / "whole"), range(1, 9))
    log_steps(JsonlSink(tmp_path / "stopped"), range(1, 7))
    with (tmp_path / "stopped" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "rew')  # cut short by a crash
    log_steps(JsonlSink(tmp_path / "stopped", resume_step=4), range(5, 9))
    whole, stopped = (tmp_path / run / "metrics.jsonl" for run in ("whole", "stopped"))
    assert stopped.read_bytes() == whole.read_bytes()
    assert os.listdir(tmp_path / "stopped") == ["metrics.jsonl"]


def test_a_new_run_in_an_old_folder_starts_from_nothing(tmp_path: Path) -> None:
    log_steps(JsonlSink(tmp_path), range(3))
    log_steps(JsonlSink(tmp_path), [1])
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


def test_a_live_file_can_be_read(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 1.0}\n{"step": 2, "re')
    assert read_metrics(tmp_path) == [{"step": 1, "reward": 1.0}]


@pytest.mark.parametrize("line", ["no json", "[1]", '{"reward": 1}', '{"step": 1, "reward": "x"}'])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(DataError, match=r"\bmetrics\.jsonl line 2\b"):
        read_metrics(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "summary.json", b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(tmp_path / "summary.json", b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_phases_add_up_also_where_they_fail_and_reset() -> None:
    times = iter([0.0, 2.0, 10.0, 10.5, 20.0, 21.0])
    phases = Phases(clock=lambda: next(times))
    for name in ("rollout", "update", "rollout"):
        with suppress(RuntimeError), phases(name):
            raise RuntimeError
    assert phases.seconds() == {"seconds/rollout": 3.0, "seconds/update": 0.5}
    assert phases.seconds() == {}


def test_waits_are_those_within_the_phase() -> None:
    phases, number = Phases(), torch.ones(2)
    awaited(number)
    with phases("step"):
        for name in ("rollout", "update", "rollout"):
            with phases(name):
                awaited(number)
        awaited(number)
    assert phases.waits() == {"waits/rollout": 2, "waits/update": 1, "waits/step": 4}
    assert phases.waits() == {}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="elsewhere getrusage is all there is")
def test_peak_memory_is_that_of_the_process_itself() -> None:
    with mmap.mmap(-1, 2**30) as held:  # malloc might keep it when it is freed
        for start in range(0, len(held), 2**24):
            held[start : start + 2**24] = b"x" * 2**24
    assert peak_rss_gib() > 1
    code = "from fovea.metrics.log import peak_rss_gib; print(peak_rss_gib())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.05 < float(child.stdout) < 0.9, "it has imported torch, and holds nothing of its parent"


def test_memory_of_a_phase_shows_what_it_holds() -> None:
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests of this process have freed would be taken again
    phases = Phases()
    with phases("small"):
        pass
    with phases("large"):
        held = np.ones(2**28, dtype=np.uint8)  # a quarter of a GiB, written to
    del held
    with phases("large"):
        pass  # a phase that comes again, as of several rollouts in a step
    gib = phases.gib()
    assert gib["memory/large_gib"] - gib["memory/small_gib"] == pytest.approx(0.25, abs=0.05)
    assert phases.gib() == {}


@pytest.mark.parametrize(
    ("content", "lost"),
    [
        ('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4}\n', 0),
        ('{"step": 3}\n{"step": 4}\n', 0),  # gone on from the checkpoint of another run
        ('{"step": 1}\n{"step": 2}\n{"st', 1),
        ('{"step": 1}\n' + "\0" * 4096, 2),
        ('{"step": 1}\n' + "\0" * 100 + '\n{"step": 3}\n', 1),
        ('{"step": 1}\n\0\0{"step": 2}\n{"step": 3}\n', 1),
        ("\0" * 4096 + "\n", 3),
        ("", 3),
        (None, 3),
    ],
)
def test_a_damaged_file_is_repaired_on_a_resume_and_losses_counted(content: str, lost: int, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    sink = JsonlSink(tmp_path, resume_step=3)
    assert sink.num_lost == lost
    log_steps(sink, [4])
    rows = read_metrics(tmp_path)
    assert rows[-1]["step"] == 4
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})


SMALL = [*QUICK, "environment.test_size=8", "evaluate.test_size=2", "rollout.prompts_per_step=4"]


def train(run_dir: Path, *settings: str) -> str:
    return fovea_here("train", "recipes/shapes.yaml", f"run_dir={run_dir}", *SMALL, *settings).output


def phase_rows(text: str) -> dict[str, list[str]]:
    """Cells by the name of the phase, from the first table of phases.txt."""
    lines = text.split("Operators", maxsplit=1)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    return {name: rest for name, *rest in cells}


@pytest.mark.parametrize(
    ("start", "max_steps", "traced", "timed"),
    [
        (0, 1000, 6, [3, 4, 5]),
        (100, 1000, 106, [103, 104, 105]),
        (0, 5, 4, [1, 2, 3]),
        (0, 3, 2, [1]),
        (0, 2, 1, []),
        (9, 10, 9, []),
    ],
)
def test_warm_steps_are_timed_and_one_is_traced(start: int, max_steps: int, traced: int, timed: list[int]) -> None:
    assert traced_step(start, max_steps) == traced
    assert timed_steps(start, traced) == timed


def test_phases_are_means_and_sum_to_the_step() -> None:
    rows = [
        {"seconds/step": 4.0, "seconds/rollout": 1.0, "seconds/update": 2.5, "memory/rollout_gib": 3.0, "reward": 1.0},
        {"seconds/step": 6.0, "seconds/rollout": 2.0, "seconds/update": 3.5, "memory/rollout_gib": 5.0},
    ]
    found = [(time.name, time.seconds, time.gib) for time in phase_times(rows)]
    assert found == [("update", 3.0, None), ("rollout", 1.5, 4.0), ("between", 0.5, None), ("step", 5.0, None)]
    assert [time.share for time in phase_times(rows)] == pytest.approx([0.6, 0.3, 0.1, 1.0])


def test_what_runs_beside_the_update_or_within_a_phase_is_not_counted_twice() -> None:
    """A step of 5 that waits 1 for its rollout, updates for 3 and syncs for 0.5, while a rollout of 4 goes on."""
    seconds = {"step": 5.0, "rollout": 4.0, "data": 0.2, "idle_update": 1.0, "idle_rollout": 0.3, "update": 3.0}
    seconds |= {"weight_sync": 0.5}
    times = {time.name: time.seconds for time in phase_times([{f"seconds/{name}": x for name, x in seconds.items()}])}
    assert times == seconds | {"between": 0.5}


def test_a_real_run_leaves_a_trace_and_a_table_and_a_step_more_its_own(tmp_path: Path) -> None:
    output = train(tmp_path, "max_steps=5", "profile=true")
    folder = tmp_path / "profile"
    assert f"profile: {folder / 'phases.txt'}, {folder / 'trace.json.gz'}" in output.splitlines()

    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    phases = ("data", "rollout", "samples", "logprobs", "advantages", "update", "weight_sync")
    assert [name for name in names if name in (*phases, "step")] == ["step", *phases], "one step, in its order"
    assert any(event["name"].startswith("aten::") for event in events)

    text = (folder / "phases.txt").read_text()
    rows = phase_rows(text)
    assert set(rows) == {*phases, "between", "step"}
    ms = {name: float(cells[0].replace(",", "")) for name, cells in rows.items()}
    assert sum(ms.values()) - ms["step"] == pytest.approx(ms["step"], abs=0.05 * len(ms))
    seconds = [row["seconds/step"] for row in read_metrics(tmp_path)]
    assert ms["step"] == pytest.approx(1000 * sum(seconds[1:4]) / 3, abs=0.06), "steps 2 to 4, without the tracer"
    assert "aten::mm" in text
    assert "rollout (outside operators)" in text

    assert "profile:" not in train(tmp_path, "max_steps=5", "profile=true", "resume=auto"), "no step is left"
    assert "Phases, step 6 (tracer on)" in train(tmp_path, "max_steps=6", "profile=true", "resume=auto")
    assert "profile" not in train(tmp_path / "off", "max_steps=1")
    assert not (tmp_path / "off/profile").exists()
