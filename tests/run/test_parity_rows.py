"""The search for rows of the parity gate, with the images of a host that never answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fovea.cli.doctor import check_parity
from fovea.data.prompt_source import PromptedTask, PromptSource
from fovea.run import parity
from fovea.run.parity_faults import usable_prompts
from fovea.types import SampleGroup
from fovea.wiring import images
from fovea_gym.errors import DataError
from tests.fakes import bandit_run

TINY = "model.tiny={hidden_size: 32, num_layers: 1, vocabulary_size: 300}"
SLOW = ["data.allow_private_addresses=true", "data.url_timeout_seconds=0.1"]
PLAIN: dict[str, object] = {"question": "How many are two?", "answer": "2", "image": None}


def look(folder: Path, rows: list[dict[str, object]], *words: str) -> bool:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"environment: {{name: vqa, train_files: [{file}], test_files: [{file}], dev_share: 0}}\n")
    small = [TINY, "data.on_bad_row=skip", "parity.prompts=2", "rollout.max_new_tokens=4", *SLOW]
    return check_parity([recipe], [*small, *words])


@pytest.fixture(autouse=True)
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = images.url_limits
    monkeypatch.setattr(images, "url_limits", lambda settings: replace(limits(settings), retries=0))


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=500) as server:
        yield server


def row(server: socket.socket, number: int) -> dict[str, object]:
    url = f"http://127.0.0.1:{server.getsockname()[1]}/{number}.png"
    return {"question": f"How many in {number}?", "answer": "2", "image": url}


def test_the_search_ends_before_its_last_row_with_the_rows_found(
    tmp_path: Path, silent: socket.socket, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "MAX_SEARCH_SECONDS", 0.3)
    rows = [PLAIN, *(row(silent, number) for number in range(300)), PLAIN]
    # 300 rows at .1 s each are 30 s
    monkeypatch.setattr(images, "HOST_PAUSE_SECONDS", 0.0)
    assert look(tmp_path, rows)
    assert "│ 1 without images │" in capfd.readouterr().out


ROW_SECONDS = 10.0


def search(folder: Path, usable: Callable[[int], bool], *, max_seconds: float) -> tuple[list[str], list[str]]:
    """The rows that are found where each takes its time, and the lines about the others."""
    run = bandit_run(folder)
    source, now, said = run.sources.train, 0.0, list[str]()

    class Slow(PromptSource):
        def __init__(self) -> None:
            pass

        tasks = source.tasks

        def __len__(self) -> int:
            return len(source)

        def render(self, task: object, *messages: object) -> PromptedTask:
            nonlocal now
            now += ROW_SECONDS / 2  # a row is rendered twice, the second time without its images
            if not usable(source.tasks.index(task)):
                raise DataError(f"{task.id} is broken")
            return source.render(task, *messages)

    found = usable_prompts(Slow(), run.environment, 3, max_seconds=max_seconds, say=said.append, clock=lambda: now)
    return [prompted.task.id for _, prompted in found], said


def test_the_search_has_as_many_rows_as_are_asked_for(tmp_path: Path) -> None:
    found, said = search(tmp_path, lambda number: number in (1, 2, 4, 5), max_seconds=1000.0)
    assert found == ["train/1", "train/2", "train/4"]
    assert said == [
        "parity gate: found 0 of 3 usable rows among 1 tried; train/0 is broken",
        "parity gate: found 2 of 3 usable rows among 4 tried; train/3 is broken",
    ]


def test_rows_found_in_time_are_all(tmp_path: Path) -> None:
    found, _ = search(tmp_path, lambda number: number in (0, 4, 5), max_seconds=2 * ROW_SECONDS)
    assert found == ["train/0"]
    assert search(tmp_path, lambda _: True, max_seconds=0.0)[0] == ["train/0"], "one row is always tried"


def test_without_any_row_the_limit_is_named_where_it_was_the_reason(tmp_path: Path) -> None:
    in_time = "^none of the first 4 training rows can be used within 20 s; the last error: train/3 is"
    with pytest.raises(DataError, match=in_time):
        search(tmp_path, lambda _: False, max_seconds=2 * ROW_SECONDS)
    with pytest.raises(DataError, match=r"first 16 training rows can be used; the last error: train/15 is"):
        search(tmp_path, lambda _: False, max_seconds=1000.0)


def test_the_gate_draws_conversations_within_the_tokens_of_an_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, drawn = parity.sample_group, list[SampleGroup]()
    monkeypatch.setattr(parity, "sample_group", lambda *given: drawn.append(made(*given)) or drawn[-1])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("environment: {name: frozen_lake}\n")
    words = [TINY, "parity.prompts=1", "rollout.max_new_tokens=4", "rollout.max_episode_tokens=150"]
    assert check_parity([recipe], words)
    samples = [sample for group in drawn for sample in group.samples]
    lengths = [group.prompt.num_tokens + len(sample.token_ids_T) for group in drawn for sample in group.samples]
    assert max(len(sample.turn_ends) for sample in samples) > 1
    assert max(lengths) <= 150
