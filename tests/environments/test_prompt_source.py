"""Rows as prompts: made once, bounded, bad ones counted or refused."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fovea.data.order import EpochOrder, Order
from fovea.data.prompt_source import PromptSource
from fovea_gym.errors import BadRowError, DataError
from fovea_gym.types import ImageRef
from gym_tests.tables import table
from tests.environments.prompt_sources import make_source

QUESTIONS = ["a", "bad", "b", "c", "bad", "d", "e", "too long a question"]


def order_of(source: PromptSource) -> Order:
    return Order([task.kind for task in source.tasks], weights={}, seed=0)


def test_a_prompt_is_made_once_in_bounded_memory_and_the_least_recently_used_leave() -> None:
    source, renderer = make_source(["a", "b", "c"])
    first = [source.get(index) for index in range(3)]
    assert [source.get(index) for index in range(3)] == first
    assert renderer.rendered == 3
    source, renderer = make_source(["a", "b", "c"], cache_gib=2.5 / 1024)
    # 0 was used last but one, and 1 has left
    for index, rendered in zip((0, 1, 0, 2, 0, 1), (1, 2, 2, 3, 3, 4), strict=True):
        source.get(index)
        assert renderer.rendered == rendered


PIXELS_YXC = np.zeros((1024, 1024 // 3 + 1, 3), dtype=np.uint8)


@table("picture", [PIXELS_YXC, b" " * 2**20, "data:" + " " * 2**20, Image.fromarray(PIXELS_YXC)])
def test_the_bound_counts_the_pictures_that_tasks_hold(picture: Any) -> None:
    """Prompts of one mebibyte, whose tasks hold another: the two of them are four mebibytes."""
    source, renderer = make_source(["a", "b"], cache_gib=2.5 / 1024, images=[ImageRef(source=picture)])
    for index in (0, 1, 0):
        source.get(index)
    assert renderer.rendered == 3


def test_bad_rows_are_skipped_counted_and_listed(tmp_path: Path) -> None:
    source, _ = make_source(["a", "bad", "b", "a question too long"], folder=tmp_path)
    taken = source.take(order_of(source), 6)
    assert {item.task.question for item in taken} == {"a", "b"}
    assert set(source.bad_rows) == {1, 3}
    listed = [json.loads(line) for line in (tmp_path / "bad_rows.jsonl").read_text().splitlines()]
    reasons = sorted((row["row"], row["reason"]) for row in listed)
    assert reasons == [("row 3", "prompt_too_long"), ("rows.parquet row 3", "other")]
    assert any("raise it, lower model.max_pixels" in row["error"] for row in listed)
    source, _ = make_source(["bad"])
    with pytest.raises(DataError, match=r"\bdata\.on_bad_row=error\b"):
        source.take(order_of(source), 5)


def test_a_prompt_and_its_completion_are_no_longer_than_the_model() -> None:
    source, _ = make_source(["abc", "abcd"], most_tokens=3)
    assert [source.get(index) is not None for index in range(2)] == [True, False]
    assert "4 tokens, images included, but the model has positions for only 3 before a completion" in source.bad_rows[1]


def test_skipping_does_not_disturb_the_order_of_the_rest() -> None:
    """What a resumed run takes next does not depend on when the rows were found bad."""

    def taken(num_steps: int, state: Any = None) -> tuple[list[str], Any]:
        source, _ = make_source(["a", "bad", "b", "c", "bad", "d"])
        order = order_of(source)
        if state is not None:
            order.restore(state)
        return [item.task.id for _ in range(num_steps) for item in source.take(order, 3)], order.state()

    first, state = taken(3)
    assert first + taken(3, state)[0] == taken(6)[0]


def test_rendering_ahead_changes_neither_rows_nor_their_order(tmp_path: Path) -> None:
    """Bad rows are listed when their turn comes, and not when a thread finds them."""
    found = []
    for threads in (0, 3):
        folder = tmp_path / str(threads)
        folder.mkdir()
        source, _ = make_source(QUESTIONS, folder=folder, prefetch_threads=threads)
        order, steps = order_of(source), []
        for _ in range(5):
            taken = [(item.task.id, len(item.prompt.images)) for item in source.take(order, 2)]
            steps.append((taken, order.state(), dict(source.bad_rows)))
        found.append((steps, (folder / "bad_rows.jsonl").read_text()))
    assert found[0] == found[1]


def test_the_next_step_is_ready_when_its_turn_comes() -> None:
    source, renderer = make_source(["a", "b", "c", "d", "e", "f"], prefetch_threads=1, cache_gib=0.0)
    order = order_of(source)
    source.take(order, 3)
    deadline = time.monotonic() + 30
    while renderer.rendered < 6:
        assert time.monotonic() < deadline, "nothing is rendered ahead"
        time.sleep(0.01)
    next_step = source.take(order, 3)
    assert [item.prompt.num_tokens for item in next_step] == [1, 1, 1]
    assert renderer.threads.count(threading.current_thread().name) == 3, "the second step only by the thread"


def test_a_run_that_ends_at_a_bad_row_says_how_to_skip_it() -> None:
    long = "a question of more than ten tokens"
    source, _ = make_source(["a", long], on_bad_row="error")
    for call in (lambda: source.get(1), lambda: source.peek(lambda: source.render(source.tasks[1]))):
        with pytest.raises(BadRowError, match=r", lower model\.max_pixels, or set data\.on_bad_row=skip$") as error:
            call()
        assert error.value.reason == "prompt_too_long"
    source, _ = make_source(["a", long])
    assert source.get(1) is None
    assert "on_bad_row" not in source.bad_rows[1]


def test_an_error_ahead_is_raised_in_its_turn() -> None:
    source, _ = make_source(["a", "bad"], on_bad_row="error", prefetch_threads=2)
    order = EpochOrder(2, seed=0, shuffle=False)
    assert [item.task.id for item in source.take(order, 1)] == ["row 0"]
    with pytest.raises(DataError, match="row 3: "):
        source.take(order, 1)
