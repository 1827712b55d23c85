"""The table of finished runs, from their summaries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.results import T_975, main
from fovea.report.summary import Summary, write_summary
from fovea.types import Evaluation


def run(folder: Path, *, seed: int, warmup: float | None, final: tuple[float, ...]) -> Path:
    folder.mkdir()
    readings = {
        "before": Evaluation(accuracies={"colour": (0.0,), "count": (1.0, 0.0, 0.0)}),
        "warmup": None if warmup is None else Evaluation(accuracies={"colour": (warmup,)}),
        "final": Evaluation(accuracies={"colour": (1.0,), "count": final}, parts={"answer": (0.125,)}),
        "shuffled_images": Evaluation(accuracies={"colour": (0.2,)}),
        "blank_images": None,
    }
    times = {"warmup_seconds": 1.0, "rl_seconds": 1.0, "total_seconds": 2.0}
    summary = Summary(**readings, **times, duplicates_across_splits=None, steps=7, seed=seed)  # type: ignore[arg-type]
    write_summary(folder / "summary.json", summary)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    first = run(tmp_path / "a", seed=0, warmup=0.5, final=(1.0, 1.0, 0.0))
    second = run(tmp_path / "b", seed=1, warmup=None, final=(0.0, 0.0, 0.0))
    return [f"GRPO={first},{second}"]


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_a_line_per_run_with_accuracies_by_type_or_parts(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(runs)
    headers, _, first, second, *_ = cells(capsys.readouterr().out)
    of_first, of_second = dict(zip(headers, first, strict=True)), dict(zip(headers, second, strict=True))
    assert (of_first["run"], of_first["seed"], of_first["steps"], of_first["rows"]) == ("GRPO", "0", "7", "4")
    assert (of_first["before RL"], of_first["colour"], of_first["count"]) == ("0.500", "1.000", "0.667")
    assert of_first["after"].startswith("0.750 [0.")
    assert (of_first["shuffled"], of_first["blank"]) == ("0.200", "-")
    # without a warm-up, RL began from the model as it was
    assert (of_second["seed"], of_second["before RL"]) == ("1", "0.250")
    main(["--parts", *runs])
    headers, _, first, *_ = cells(capsys.readouterr().out)
    assert "colour" not in headers
    assert dict(zip(headers, first, strict=True))["answer"] == "0.125"


def test_a_line_per_name_has_the_intervals_over_its_seeds(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Changes of .25 and 0: a mean of .125 with s = .1768, so that 12.706 s / sqrt(2) = 1.588.

    Sampled rewards of 30 steps rise from .25 to .75, or to .5, by what the environment would have given.
    """
    for folder, last in zip(runs[0].removeprefix("GRPO=").split(","), (0.75, 0.5), strict=True):
        rewards = [0.25] * 10 + [0.5] * 10 + [last] * 10
        rows = [{"step": step, "reward": 1.0, "reward/true": reward} for step, reward in enumerate(rewards, 1)]
        (Path(folder) / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (Path(folder) / "answers").mkdir()
        for name, parts in (("before", [{"km": 9.0}, {}, {}]), ("final", [{"km": 1.0}, {"km": 3.0}, {}])):
            lines = "".join(f"{json.dumps({'answers': [{'parts': part}]})}\n" for part in parts)
            (Path(folder) / "answers" / f"test-{name}.jsonl").write_text(lines)
    main([*runs, "--kinds", "count", "col", "--medians", "km"])
    headers, _, line = cells(capsys.readouterr().out)[-3:]
    assert line[:3] == ["GRPO", "2", "7"]
    assert line[3:6] == ["0.375", "0.562", "0.188 [-0.607, 0.982]"]
    assert line[6:9] == ["0.375", "0.500", "0.125 [-1.463, 1.713]"]
    assert headers[9:15] == ["count before", "count", "col before", "col", "median km before", "after"]
    assert line[9:15] == ["-", "0.333", "0.250", "1.000", "inf", "3"]
    assert dict(zip(headers[15:], line[15:], strict=True)) == {"shuffled": "0.200", "blank": "-"}
    main([runs[0].partition(",")[0]])
    assert len(cells(capsys.readouterr().out)) == 3, "one run has no spread over seeds"


def test_the_points_of_students_distribution_leave_a_fortieth_above_them() -> None:
    for degrees, point in enumerate(T_975, start=1):
        x = torch.linspace(0, point, 200_001, dtype=torch.float64)
        density = torch.distributions.StudentT(torch.tensor(float(degrees), dtype=torch.float64)).log_prob(x).exp()
        assert torch.trapezoid(density, x).item() == pytest.approx(0.475, abs=2e-5)  # they have three digits
