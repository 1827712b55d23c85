"""The notebooks of notebooks/ run from top to bottom, each in an empty folder, in a real kernel."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest

from tests.stored_notebooks import FILES, ROOT, executed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own_reward", "look_at_a_run", "agents"])
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = executed(ROOT / "notebooks" / f"{name}.ipynb", tmp_path)
    shown = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    assert all(cell.outputs for cell in done.cells if cell.cell_type == "code" and not cell.source.endswith("train()"))
    said = [output["text"] for output in shown if output.get("name") == "stderr"]
    # tqdm, which transformers imports, misses a package for bars
    assert [text for text in said if "IProgress not found" not in text] == []
    for summary in (tmp_path / "runs").glob("*/summary.json"):
        accuracy = json.loads(summary.read_text())["accuracy"]
        assert accuracy["final"] > accuracy["before"], "a reader would see a run that does not learn"
        assert accuracy["final"] > accuracy["warmup"] or name == "look_at_a_run", (
            "its few steps of RL only show the page"
        )
    if name == "own_reward":
        check_answers(tmp_path / "runs" / "colours")
    for cell in done.cells:
        if cell.cell_type == "code" and "trainer.train()" in cell.source:
            check_progress(cell.outputs)


def check_answers(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "answers" / "test-final.jsonl").read_text().splitlines()]
    answers = [(row["truth"], row["answers"][0]) for row in rows]
    right = [(truth, answer["turns"][-1]["text"]) for truth, answer in answers if answer["reward"] == 1]
    assert {text for _, text in right} <= {"red", "green", "blue"}
    assert all(text.strip() == truth for truth, text in right)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["blank_images"] < 0.5 < summary["accuracy"]["final"], "the answers do not depend on the picture"


def check_progress(outputs: list[nbformat.NotebookNode]) -> None:
    """One display, which was updated in place to the last step, and few lines beside it."""
    (display,) = (html for out in outputs if "<progress" in (html := out.get("data", {}).get("text/html", "")))
    assert re.search(r'<progress [^>]*max="(\d+)" value="\1">', display)
    assert "<polyline" in display
    lines = "".join(out.get("text", "") for out in outputs if out.output_type == "stream").splitlines()
    assert len(outputs) + len(lines) < 20


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_notebook_is_stored_with_its_outputs_and_nothing_of_a_machine(file: Path) -> None:
    cells = [cell for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.outputs for cell in cells if not cell.source.endswith("train()"))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"display_data", "execute_result", "stream"}, "no errors"
    text = json.dumps(outputs)
    assert [part for part in ("/tmp/", "/root", "/home", "site-packages") if part in text] == []
    assert file.stat().st_size < 100_000
