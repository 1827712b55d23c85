"""The search for rows of the parity gate, with the images of a host that never answers."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fovea.cli.main import app

TINY = "model.tiny={hidden_size: 32, num_layers: 1, head_dim: 16, vocabulary_size: 300, vision_depth: 1}"
SLOW = ["data.allow_private_addresses=true", "data.url_timeout_seconds=0.4", "data.url_retries=0"]


def doctor(folder: Path, rows: list[dict[str, object]], *words: str) -> Result:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"environment: {{name: vqa, train_files: [{file}], test_files: [{file}], dev_share: 0}}\n")
    small = [TINY, "data.on_bad_row=skip", "parity.prompts=2", "rollout.max_new_tokens=4", *SLOW]
    return CliRunner().invoke(app, ["doctor", str(recipe), *small, *words], env={"COLUMNS": "400"})


@pytest.fixture
def dead() -> object:
    with socket.create_server(("127.0.0.1", 0), backlog=500) as silent:
        yield f"http://127.0.0.1:{silent.getsockname()[1]}"


def row(url: str, number: int) -> dict[str, object]:
    return {"question": f"How many in {number}?", "answer": "2", "image": f"{url}/{number}.png"}


def test_a_dead_host_is_named_and_not_waited_for(tmp_path: Path, dead: str) -> None:
    """300 rows at .4 s each would be two minutes."""
    started = time.monotonic()
    done = doctor(tmp_path, [row(dead, number) for number in range(300)])
    assert time.monotonic() - started < 60
    assert "none of the first 300 training rows can be used" in done.output
    host = dead.removeprefix("http://")
    assert done.output.count(f"{host} failed for 3 images in a row, the last one: ") == 1
    assert "parity gate: 0 of 2 rows found among 1 tried" in done.output


def test_the_search_ends_in_time_with_the_rows_found(tmp_path: Path, dead: str) -> None:
    plain: dict[str, object] = {"question": "How many are two?", "answer": "2", "image": None}
    rows = [plain, *(row(dead, number) for number in range(300)), plain]
    never_given_up = "data.url_host_pause_seconds=0"
    done = doctor(tmp_path, rows, never_given_up, "parity.max_search_seconds=2")
    assert done.exit_code == 0, done.output
    assert "1 of 2 rows found among" in done.output
    failed = doctor(tmp_path, rows[1:], never_given_up, "parity.max_search_seconds=2")
    assert "training rows can be used in parity.max_search_seconds=2, the last one: " in failed.output
