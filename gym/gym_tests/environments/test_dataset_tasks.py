"""Rows of the user's own as tasks: layouts side by side, templates, kinds and frames."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from PIL import Image
from pydantic import ValidationError

from fovea_gym.environments.dataset_tasks import FileTasks
from fovea_gym.errors import BadRowError, DataError
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.rows import InMemory
from fovea_gym.rows.tasks import kinds_of, place_of
from fovea_gym.settings.environments import Geo3kEnvironment
from fovea_gym.types import ImageRef, Task
from gym_tests.tables import table

PICTURE = Image.new("RGB", (4, 4))


def settings(**changes: object) -> Geo3kEnvironment:
    """Settings whose training rows are all trained on, unless `changes` say otherwise."""
    return Geo3kEnvironment.model_validate({"train_files": ("a",), "test_files": ("a",), "dev_share": 0, **changes})


def tasks_of(rows: InMemory, **changes: object) -> FileTasks:
    # rows in memory stand in for a file of them, which could not hold all of their faults
    in_memory = {"train_files": (rows,), "test_files": (rows,)}
    return FileTasks(settings(**changes).model_copy(update=in_memory), RowAccess())


def said(files: FileTasks, task: Task) -> list[tuple[str, str]]:
    """Roles and texts, an image as `#`."""
    return [
        (message.role, "".join("#" if isinstance(part, ImageRef) else part for part in message.parts))
        for message in files.prompt(task)
    ]


def test_layouts_stand_side_by_side() -> None:
    files = tasks_of(
        [
            {"problem": "<image>Hub?", "answer": r"\boxed{1}", "images": [PICTURE]},
            {"prompt": [{"role": "user", "content": "Verl <image>?"}], "reward_model": {"ground_truth": "2"}}
            | {"images": [PICTURE], "extra_info": {"answer": "no"}},
            {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Three."}]}
            | {"image": PICTURE},
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Parts?"}]},
                    {"role": "assistant", "content": "4"},
                ],
                "images": [PICTURE],
            },
            {"question": "Text alone?", "answer": 5},
        ]
    )
    tasks = files.tasks("train")
    asked = ("#Hub?", "Verl #?", "#Who?", "#Parts?", "Text alone?")
    assert [said(files, task)[-1] for task in tasks] == [("user", text) for text in asked]
    assert said(files, tasks[3])[0] == ("system", "Be brief.")
    assert [task.answer for task in tasks] == ["1", "2", "Three.", "4", "5"]
    assert tasks[1].row["extra_info"] == {"answer": "no"}


def test_template_and_system_prompt_frame_the_question() -> None:
    row = {"problem": "<image>Find {x}.", "answer": "1", "images": [PICTURE]}
    files = tasks_of([row], prompt_template="Q: {prompt}\nBox it.", system_prompt="Rules.")
    (task,) = files.tasks("train")
    assert said(files, task) == [("system", "Rules."), ("user", "Q: #Find {x}.\nBox it.")]
    assert task.question == "<image>Find {x}."
    with pytest.raises(ValidationError, match=r"\{prompt\}"):
        settings(prompt_template="Box it.")


def test_kinds_come_from_a_column() -> None:
    rows = [{"problem": "?", "answer": "1", "type": kind} for kind in ("count", "colour", None, 3)]
    files = tasks_of(rows, kind_key="type")
    assert list(kinds_of(files.tasks("train"))) == ["count", "colour", "all", "3"]
    assert [task.kind for task in files.tasks("test")] == ["count", "colour", "all", "3"]


@table("cell", ["pictures/one.PNG", "https://host/one.jpeg", {"bytes": b"x", "path": None}, ["one.webp"]])
def test_images_under_a_name_that_is_not_known_are_told(cell: object) -> None:
    rows = [{"problem": "?", "answer": "1", "file_name": cell}]
    with pytest.raises(DataError, match=r"\bfile_name\b"):
        tasks_of(rows).tasks("train")
    assert tasks_of(rows, image_keys=()).tasks("train")[0].images == ()


def test_image_key_is_short_for_one_of_image_keys() -> None:
    rows = [{"problem": "?", "answer": "1", "images": [PICTURE, PICTURE], "photo": PICTURE}]
    for changes, count in [({}, 2), ({"image_key": "photo"}, 1), ({"image_keys": ("photo", "images")}, 3)]:
        assert len(tasks_of(rows, **changes).tasks("train")[0].images) == count
    assert tasks_of(rows, image_keys=()).tasks("train")[0].images == ()


def test_rows_without_images_are_asked_without() -> None:
    names = {"problem": "What opens a.png", "answer": "b.png", "type": "c.png"}
    rows = [names | {"source": "a page", "n": 3, "url": None}]
    assert tasks_of(rows, kind_key="type").tasks("train")[0].images == ()


def test_a_row_keeps_its_place_when_it_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"problem": "?", "answer": "{n}"}}\n' for n in range(5)))
    files = FileTasks(settings(train_files=(str(tmp_path / "a.jsonl"),), dev_share=0.2), RowAccess())
    (dev,) = files.tasks("dev")
    place = place_of(files.tasks("dev"), 0)
    assert place is not None
    assert (place.where, dev.id) == (f"a.jsonl line {int(dev.answer) + 1}", f"dev/{dev.answer}")
    assert sorted([*(task.answer for task in files.tasks("train")), dev.answer]) == list("01234")


def test_a_frame_is_a_data_set() -> None:
    frame = pd.DataFrame({"problem": ["<image>One?", "Two?"], "answer": [1, 2.5], "image": [PICTURE, None]})
    first, second = tasks_of(frame).tasks("train")
    assert (first.answer, len(first.images)) == ("1.0", 1)
    assert (second.answer, second.images) == ("2.5", ())


def row(problem: object = "<image>?", answer: object = "12", num_images: int = 1) -> dict[str, object]:
    return {"images": [PICTURE] * num_images, "problem": problem, "answer": answer}


@table(
    ("cells", "reason", "problem"),
    [
        ({"answer": "1"}, "prompt_empty", "the row has no question"),
        ({"problem": "?"}, "answer_missing", "no column is called answer or reward_model"),
        ({"conversations": [{"from": "human", "value": "Who?"}]}, "answer_missing", "no column is called answer"),
        (row(answer=float("inf")), "answer_kind", "the answer is inf, not a text or a number"),
        (row(answer=True), "answer_kind", "the answer is of type bool"),
        (row(answer=None), "answer_missing", "the answer is missing, so no response can be right"),
        (row(answer=" "), "answer_missing", "the answer is empty, so no response can be right"),
        (row(answer=r"\boxed{}"), "answer_missing", "the answer is empty"),
        (row(answer={"style": "rule"}), "answer_missing", "the answer is missing"),
        (row(num_images=2), "image_marks", "1 <image> marks but 2 images, which do not pair up"),
        (row("<image><image>?"), "image_marks", "2 <image> marks but 1 images, which do not pair up"),
        (row("<image>"), "prompt_empty", "the prompt is empty, so there is nothing to answer"),
        (row("   "), "prompt_empty", "the prompt is empty"),
        (row("half \ud83d"), "text_damaged", "the text holds half a character"),
        (row(7), "prompt_kind", "the prompt is of type int, not a text"),
        (row([]), "prompt_role", "the last message is missing"),
        (row(["Find x."]), "prompt_kind", "a value of type str is not a message {role, content}"),
        (row([{"role": "assistant", "content": "a"}]), "prompt_role", "the last message is assistant"),
        (row([{"role": "tool", "content": "a"}]), "prompt_role", "is 'tool', not one of system, user"),
        (row([{"role": "user", "content": None}]), "prompt_kind", "the prompt is of type NoneType"),
        (
            row([{"role": "user", "content": [{"type": "audio"}]}]),
            "prompt_kind",
            "is of type 'audio', not text or image",
        ),
        (row() | {"images": [7]}, "image_kind", "image 1: a value of type int is not an image"),
    ],
)
def test_bad_rows_say_what_is_wrong(cells: dict[str, object], reason: str, problem: str) -> None:
    with pytest.raises(BadRowError) as error:
        tasks_of([row(), cells]).tasks("train")[1]
    text = str(error.value)
    assert error.value.reason == reason
    assert problem in text
    assert "row 1" in text
    assert text == f"{error.value.problem}; {error.value.fix}"
    assert "data." not in text
    assert "\n" not in text


def test_a_file_without_a_question_says_which_columns_it_has() -> None:
    with pytest.raises(DataError, match=r"\btext, label; set prompt_key"):
        tasks_of([{"text": "?", "label": "1"}]).tasks("train")


def test_a_kind_is_a_name_that_files_can_hold(tmp_path: Path) -> None:
    """JSON may hold half a character, and kinds become names of metrics."""
    lines = [f'{{"problem": "1+1?", "answer": "2", "kind": "{kind}"}}\n' for kind in ("caf\\ud800", "plain")]
    (tmp_path / "rows.jsonl").write_text("".join(lines), encoding="ascii")
    files = FileTasks(settings(train_files=(str(tmp_path / "rows.jsonl"),), kind_key="kind"), RowAccess())
    assert kinds_of(files.tasks("train")) == ["caf?", "plain"]
