"""Cells of a real Jupyter kernel, whose event loop is running, and the notebooks of notebooks/ from top to bottom."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

from tests.stored_notebooks import FILES, ROOT, executed

CELL_SECONDS = 120
TRAIN = f"""
from pathlib import Path

from fovea.wiring.run import build
from fovea.config.loading import load_config
from fovea.loop import train

def run_of(*words):
    sizes = ["environment.train_size=64", "environment.dev_size=8", "environment.test_size=8", "evaluate.dev_size=8"]
    rollout = ["rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "warmup=null"]
    return build(load_config([Path({str(ROOT / "recipes" / "shapes.yaml")!r})], [*sizes, *rollout, *words]))
"""


class Notebook:
    def __init__(self, manager: KernelManager, client: BlockingKernelClient, folder: Path) -> None:
        self._manager, self._client, self.folder = manager, client, folder

    def run(self, code: str, interrupt_at: str | None = None) -> tuple[str, str | None]:
        """Run a cell; returns what it prints and the name of the exception that it raises.

        With `interrupt_at`, press its stop button once it has shown that pattern.
        """
        shown: list[str] = []

        def on_output(message: dict[str, Any]) -> None:
            nonlocal interrupt_at
            content = message["content"]
            shown.append(content.get("text") or content.get("data", {}).get("text/plain", ""))
            if interrupt_at is not None and re.search(interrupt_at, "".join(shown)):
                interrupt_at = None
                self._manager.interrupt_kernel()

        reply = self._client.execute_interactive(code, timeout=CELL_SECONDS, output_hook=on_output)
        return "".join(shown), reply["content"].get("ename")

    def result(self, code: str) -> str:
        """Run a cell that succeeds; returns what it prints."""
        text, error = self.run(code)
        assert error is None, text
        return text


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("notebook")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(folder), env=environment)
    try:
        yield Notebook(manager, client, folder)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.slow
def test_a_run_trains_and_is_evaluated_in_cells(notebook: Notebook) -> None:
    assert "step 2/2" in notebook.result(TRAIN + "train(run_of('run_dir=run', 'max_steps=2')).steps")
    assert (notebook.folder / "run" / "summary.json").is_file()
    notebook.result(
        "from fovea.commands.evaluate import EvalOptions, evaluate_targets\n"
        "len(evaluate_targets(['run', 'majority'], [], EvalOptions(json_file=Path('eval.json'))))"
    )
    assert len(json.loads((notebook.folder / "eval.json").read_text())["targets"]) == 2


@pytest.mark.slow
def test_a_file_is_graded_in_a_cell(notebook: Notebook) -> None:
    (notebook.folder / "answers.jsonl").write_text(json.dumps({"prediction": r"\boxed{3}", "truth": "3"}) + "\n")
    grade = "from pathlib import Path\nfrom fovea_gym.commands.grade import grade_file\n"
    assert notebook.result(grade + "grade_file('geo3k', Path('answers.jsonl'), print).mean_score").endswith("1.0")


@pytest.mark.slow
def test_the_stop_button_saves_the_step_and_the_next_cell_resumes_it(notebook: Notebook) -> None:
    made = (
        "import fovea\n"
        "settings = {'model.tiny': {}, 'threads': 1, 'environment.train_size': 64, 'environment.dev_size': 8,\n"
        "    'environment.test_size': 8, 'rollout.prompts_per_step': 6, 'rollout.samples_per_prompt': 4,\n"
        "    'rollout.max_new_tokens': 8, 'parity.prompts': 1, 'checkpoint.every_steps': 0, 'run_dir': 'stopped'}\n"
    )
    text, error = notebook.run(made + "fovea.GRPO(settings=settings, max_steps=100000).train()", r"step [1-9]")
    assert error == "KeyboardInterrupt"
    assert "SIGINT: saved at step" in text
    left = notebook.result("import threading\n[each.name for each in threading.enumerate() if 'fovea' in each.name]")
    assert left == "[]", "the run goes on in its thread"
    resumed = notebook.result(
        "steps = len(fovea.load_run('stopped').metrics)\n"
        "again = fovea.GRPO(settings=settings, max_steps=steps + 1, resume='auto').train()\n"
        "(len(again.metrics) - steps, again.summary['steps'] - steps)"
    )
    assert "resumed at step" in resumed
    assert resumed.endswith("(1, 1)"), "no step was lost, and none was taken twice"


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
        # the few steps of RL of look_at_a_run only show the page
        assert accuracy["final"] > accuracy["warmup"] or name == "look_at_a_run"
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
