"""Rows as prompts: made once, bounded, bad ones counted or refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from fovea.data.bad_rows import BadRows
from fovea.data.order import Order
from fovea.environments.prompt_source import PromptSource
from fovea.errors import DataError
from fovea.types import Message, Prompt, PromptImage, Task
from tests.fakes import BanditEnvironment


class PixelRenderer:
    """Prompts with an image of one mebibyte; a question of "bad" cannot be read."""

    def __init__(self) -> None:
        self.rendered = 0

    def fewest_tokens(self, _messages: Sequence[Message]) -> int:
        return 0

    def prompt(self, messages: Sequence[Message], where: str = "") -> Prompt:
        question = str(messages[0].parts[0])
        if question == "bad":
            raise DataError("rows.parquet row 3: no image; drop the row")
        self.rendered += 1
        image = PromptImage(key=question, tensors={"pixels": np.zeros((1024, 256), dtype=np.float32)}, num_tokens=256)
        return Prompt(
            token_ids_L=np.zeros(len(question), dtype=np.int64),
            unexpanded_ids_U=np.zeros(len(question), dtype=np.int64),
            images=(image,),
        )


def make_source(
    questions: Sequence[str],
    *,
    on_bad_row: Literal["error", "skip"] = "skip",
    cache_gib: float = 1.0,
    folder: Path | None = None,
) -> tuple[PromptSource, PixelRenderer]:
    tasks = [Task(id=f"row {index}", question=question, answer="a") for index, question in enumerate(questions)]
    renderer = PixelRenderer()
    source = PromptSource(
        tasks,
        BanditEnvironment(),
        renderer,
        max_prompt_tokens=10,
        on_bad_row=on_bad_row,
        cache_gib=cache_gib,
        bad_rows=BadRows(folder),
    )
    return source, renderer


def order_of(source: PromptSource) -> Order:
    return Order([task.kind for task in source.tasks], weights={}, seed=0)


def test_a_prompt_is_made_once() -> None:
    source, renderer = make_source(["a", "b", "c"])
    first = [source.get(index) for index in range(3)]
    assert [source.get(index) for index in range(3)] == first
    assert renderer.rendered == 3


def test_memory_is_bounded_and_the_least_recently_used_leave() -> None:
    source, renderer = make_source(["a", "b", "c"], cache_gib=2.5 / 1024)
    for index in (0, 1, 0, 2):
        source.get(index)
    assert renderer.rendered == 3
    source.get(0)
    assert renderer.rendered == 3, "used last but one"
    source.get(1)
    assert renderer.rendered == 4, "had left"


def test_bad_rows_are_skipped_counted_and_listed(tmp_path: Path) -> None:
    source, _ = make_source(["a", "bad", "b", "a question too long"], folder=tmp_path)
    taken = source.take(order_of(source), 6)
    assert {item.task.question for item in taken} == {"a", "b"}
    assert set(source.bad_rows) == {1, 3}
    listed = [json.loads(line) for line in (tmp_path / "bad_rows.jsonl").read_text().splitlines()]
    assert sorted(row["row"] for row in listed) == ["row 3", "rows.parquet row 3"]
    assert sorted(row["reason"] for row in listed) == ["other", "prompt_too_long"]
    assert any("raise that, lower model.max_pixels" in row["error"] for row in listed)


def test_bad_rows_stop_the_run_where_asked() -> None:
    source, _ = make_source(["bad"], on_bad_row="error")
    with pytest.raises(DataError, match="row 3: no image; drop the row"):
        source.take(order_of(source), 1)


def test_a_data_set_of_bad_rows_alone_ends() -> None:
    source, _ = make_source(["bad"])
    with pytest.raises(DataError, match=r"bad rows in a row, the last one: .*; set data\.on_bad_row=error"):
        source.take(order_of(source), 5)


def test_skipping_does_not_disturb_the_order_of_the_rest() -> None:
    """What a resumed run takes next does not depend on when the rows were found bad."""
    questions = ["a", "bad", "b", "c", "bad", "d"]
    whole, _ = make_source(questions)
    order = order_of(whole)
    expected = [item.task.id for _ in range(6) for item in whole.take(order, 3)]
    first, _ = make_source(questions)
    order = order_of(first)
    taken = [item.task.id for _ in range(3) for item in first.take(order, 3)]
    second, _ = make_source(questions)
    resumed = order_of(second)
    resumed.restore(order.state())
    assert taken + [item.task.id for _ in range(3) for item in second.take(resumed, 3)] == expected
