"""A judge that fails some calls during an evaluation: a real server, and the commands as a user types them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from fovea.cli.main import app
from fovea.config.run import Config
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.metrics.names import undefined
from fovea.wiring.run import build
from gym_tests.chat_server import Endpoint, says
from gym_tests.environments.files import files, row

ROWS = [row("Describe it.", f"A square, number {number}.", "red") for number in range(6)]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    served = Endpoint((400, b"refused"), says("Score: 10"))
    yield served
    served.server.shutdown()
    served.server.server_close()


def evaluated(folder: Path, endpoint: Endpoint, on_failure: str) -> Result:
    judge = {"url": endpoint.url, "model": "m", "max_concurrency": 1, "on_failure": on_failure}
    environment = {"name": "caption", "metric_weights": {"judge": 1}, **files(folder, ROWS)}
    plain = json.loads(json.dumps(environment))
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"model": {"tiny": {}}, "environment": plain, "judge": judge}))
    words = ["eval", "gold", "constant:x", "--recipe", str(folder / "recipe.yaml"), "--json", str(folder / "eval.json")]
    return CliRunner().invoke(app, words, env={"COLUMNS": "400"})


def test_a_failed_call_leaves_its_row_out_and_is_counted(tmp_path: Path, endpoint: Endpoint) -> None:
    done = evaluated(tmp_path, endpoint, "drop")
    assert done.exit_code == 0, done.output
    assert re.search(r"gold: not scored, left out: test/\d: the judge at .* gave no score: status 400", done.output)
    assert "not scored" in done.output
    content = json.loads((tmp_path / "eval.json").read_text())
    assert [len(reasons) for reasons in content["unscored"].values()] == [1, 0]
    gold, constant = content["targets"]
    assert (gold["rows_unscored"], constant["rows_unscored"]) == (1, 0)
    # the row is left out for both, so that they are compared on the same rows
    assert [(each["accuracy"]["n"], each["accuracy"]["mean"]) for each in (gold, constant)] == [(5, 1.0), (5, 1.0)]


def test_a_failed_call_is_an_error_by_default(tmp_path: Path, endpoint: Endpoint) -> None:
    failed = evaluated(tmp_path, endpoint, "error")
    assert failed.exit_code == 2, failed.output
    assert failed.stderr.strip().endswith("fix it, or set judge.on_failure=drop to leave such groups out")


def test_a_run_leaves_the_row_out_of_its_readings(tmp_path: Path, endpoint: Endpoint) -> None:
    """The first call is about a test row, before training; the judge is a part of another environment's reward."""
    judge = {"url": endpoint.url, "model": "m", "max_concurrency": 1, "on_failure": "drop"}
    settings: dict[str, Any] = {
        **{"run_dir": str(tmp_path / "run"), "max_steps": 1, "parity": {"prompts": 0}},
        "model": {"tiny": {"hidden_size": 32, "num_layers": 1, "vocabulary_size": 300}},
        "environment": {"name": "shapes", "train_size": 8, "dev_size": 2, "test_size": 4},
        **{"model_reward": {"judge": 0.5}, "judge": judge},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4},
        "evaluate": {"image_controls": False, "shared_images": "ignore"},
        "log": {"tensorboard": False, "progress": False},
    }
    summary = train(build(Config.model_validate(settings)))
    assert summary.before is not None
    assert (summary.before.num_rows, summary.before.num_unscored) == (3, 1)
    assert (summary.final.num_rows, summary.final.num_unscored) == (4, 0)
    (row_of_step,) = read_metrics(tmp_path / "run")
    assert (row_of_step["reward/judge"], row_of_step["groups/unscored"]) == (1.0, 0.0)
    assert not list(undefined(row_of_step))
    (listed,) = (tmp_path / "run" / "unscored.jsonl").read_text().splitlines()
    assert json.loads(listed)["step"] is None
