"""Training, evaluation and grading in the cells of a real Jupyter kernel, whose event loop is running."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
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


class Cell(NamedTuple):
    """What a cell printed, and the name of the exception that it raised."""

    text: str
    error: str | None


class Notebook:
    def __init__(self, manager: KernelManager, client: BlockingKernelClient, folder: Path) -> None:
        self._manager = manager
        self._client = client
        self.folder = folder

    def run(self, code: str, interrupt_at: str | None = None) -> Cell:
        """Run a cell; with `interrupt_at`, press its stop button once it has shown that pattern."""
        shown: list[str] = []

        def on_output(message: dict[str, Any]) -> None:
            nonlocal interrupt_at
            content = message["content"]
            shown.append(content.get("text") or content.get("data", {}).get("text/plain", ""))
            if interrupt_at is not None and re.search(interrupt_at, "".join(shown)):
                interrupt_at = None
                self._manager.interrupt_kernel()

        reply = self._client.execute_interactive(code, timeout=CELL_SECONDS, output_hook=on_output)
        return Cell("".join(shown), reply["content"].get("ename"))


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


def test_a_run_trains_and_is_evaluated_in_cells(notebook: Notebook) -> None:
    trained = notebook.run(TRAIN + "train(run_of('run_dir=run', 'max_steps=2')).steps")
    assert trained.error is None, trained.text
    assert "step 2/2" in trained.text
    assert (notebook.folder / "run" / "summary.json").is_file()
    evaluated = notebook.run(
        "from fovea.commands.evaluate import EvalOptions, evaluate_targets\n"
        "len(evaluate_targets(['run', 'majority'], [], EvalOptions(json_file=Path('eval.json'))))"
    )
    assert evaluated.error is None, evaluated.text
    assert len(json.loads((notebook.folder / "eval.json").read_text())["targets"]) == 2


def test_a_file_is_graded_in_a_cell(notebook: Notebook) -> None:
    (notebook.folder / "answers.jsonl").write_text(json.dumps({"prediction": r"\boxed{3}", "truth": "3"}) + "\n")
    graded = notebook.run(
        "from pathlib import Path\n"
        "from fovea_gym.commands.grade import grade_file\n"
        "grade_file('geo3k', Path('answers.jsonl'), print).mean_score"
    )
    assert graded.error is None, graded.text
    assert graded.text.endswith("1.0")


def test_the_stop_button_saves_the_step_and_the_next_cell_resumes_it(notebook: Notebook) -> None:
    made = (
        "import fovea\n"
        "settings = {'model.tiny': {}, 'threads': 1, 'environment.train_size': 64, 'environment.dev_size': 8,\n"
        "    'environment.test_size': 8, 'rollout.prompts_per_step': 6, 'rollout.samples_per_prompt': 4,\n"
        "    'rollout.max_new_tokens': 8, 'parity.prompts': 1, 'checkpoint.every_steps': 0, 'run_dir': 'stopped'}\n"
    )
    stopped = notebook.run(made + "fovea.GRPO(settings=settings, max_steps=100000).train()", interrupt_at=r"step [1-9]")
    assert stopped.error == "KeyboardInterrupt"
    assert "SIGINT: saved at step" in stopped.text
    left = notebook.run("import threading\n[each.name for each in threading.enumerate() if 'fovea' in each.name]")
    assert left.text == "[]", "the run goes on in its thread"
    resumed = notebook.run(
        "steps = len(fovea.load_run('stopped').metrics)\n"
        "again = fovea.GRPO(settings=settings, max_steps=steps + 1, resume='auto').train()\n"
        "(len(again.metrics) - steps, again.summary['steps'] - steps)"
    )
    assert resumed.error is None, resumed.text
    assert "resumed at step" in resumed.text
    assert resumed.text.endswith("(1, 1)"), "no step was lost, and none was taken twice"
