"""Rows of the user's own as tasks: layouts, templates, kinds and frames; the choice of dev rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pydantic import ValidationError

from fovea_gym.environments.dataset_tasks import FileTasks
from fovea_gym.environments.file_splits import image_hashes, split_by_image
from fovea_gym.environments.vqa import Vqa
from fovea_gym.errors import BadRowError, DataError
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.rows import InMemory, open_rows
from fovea_gym.rows.tasks import kinds_of, place_of
from fovea_gym.settings.environments import Geo3kEnvironment, VqaEnvironment
from fovea_gym.types import ImageRef, Task
from gym_tests.environments.geospot.places import geospot
from gym_tests.images import png
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
    keys = [{}, {"image_key": "photo"}, {"image_keys": ("photo", "images")}, {"image_keys": ()}]
    assert [len(tasks_of(rows, **changes).tasks("train")[0].images) for changes in keys] == [2, 1, 3, 0]
    # text that names files is no image
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
        (row([{"role": "user", "content": [{"type": "audio"}]}]), "prompt_kind", "is of type 'audio', not text or im"),
        (row() | {"images": [7]}, "image_kind", "image 1: a value of type int is not an image"),
    ],
)
def test_bad_rows_say_what_is_wrong(cells: dict[str, object], reason: str, problem: str) -> None:
    with pytest.raises(BadRowError) as error:
        tasks_of([row(), cells]).tasks("train")[1]
    text = str(error.value)
    assert (error.value.reason, text) == (reason, f"{error.value.problem}; {error.value.fix}")
    assert problem in text
    assert "row 1" in text
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


def picture(number: int) -> bytes:
    """A separate picture for every number."""
    return png((number % 256, number // 256, 7), 4)


def vqa(folder: Path, rows: list[dict[str, object]], **settings: object) -> Vqa:
    test = [{"images": [picture(60_000 + n)], "problem": "test", "answer": "test"} for n in range(3)]
    files = {}
    for split, of_split in (("train", rows), ("test", test)):
        files[f"{split}_files"] = (str(folder / f"{split}.parquet"),)
        pq.write_table(pa.Table.from_pylist(of_split), folder / f"{split}.parquet")
    return Vqa(VqaEnvironment.model_validate({**files, **settings}), RowAccess())


def yes_no_rows(num: int = 1000, rows_per_image: int = 2) -> list[dict[str, object]]:
    """Yes and no in turn, as `fovea data vqa` draws them; several questions on each picture."""
    return [
        {"images": [picture(n // rows_per_image)], "problem": f"question {n}", "answer": "no" if n % 2 else "yes"}
        for n in range(num)
    ]


def images_of(tasks: list[Task]) -> set[object]:
    return {image.source for task in tasks for image in task.images}


@table(
    ("rows", "message"),
    [
        ([{"images": ["absent.png"]}] * 60, r"row 0, image 1 \(.*absent\.png\): no such image file"),
        ([{"images": [picture(1)]}] * 60, "the 60 training rows, .* share one image, .* set dev_files, or dev_share=0"),
        ([{"images": [picture(1)]}], "there is a single training row"),
    ],
)
def test_why_no_row_can_be_held_out(rows: list[dict[str, object]], message: str, tmp_path: Path) -> None:
    environment = vqa(tmp_path, [{"problem": "question", "answer": "yes", **row} for row in rows], dev_share=0.2)
    with pytest.raises(DataError, match=message):
        environment.tasks("dev")
    assert len(environment.tasks("train")) == len(rows)


@pytest.mark.parametrize("rows_per_image", [1, 2, 5])
def test_dev_is_a_sample_of_rows_that_alternate_and_no_image_crosses(rows_per_image: int, tmp_path: Path) -> None:
    environment = vqa(tmp_path, yes_no_rows(rows_per_image=rows_per_image), dev_share=0.2)
    train, dev = list(environment.tasks("train")), list(environment.tasks("dev"))
    assert (len(dev), len(train)) == (200, 800)
    for rows in (dev, dev[:50]):  # the first are a sample too: evaluate.dev_size reads no more
        share = Counter(task.answer for task in rows)["yes"] / len(rows)
        # three standard deviations of a random sample
        assert abs(share - 0.5) < 3 * 0.5 / len(rows) ** 0.5
    assert not images_of(train) & images_of(dev)
    assert {task.question for task in train + dev} == {f"question {n}" for n in range(1000)}


def test_dev_is_no_test_row_whatever_is_set(tmp_path: Path) -> None:
    for settings in ({}, {"dev_share": 0.5}, {"dev_files": (str(tmp_path / "train.parquet"),)}):
        environment = vqa(tmp_path, yes_no_rows(40), **settings)
        assert {task.question for task in environment.tasks("test")} == {"test"}
        assert all(task.question.startswith("question") for task in environment.tasks("dev"))


def test_the_choice_is_the_same_every_time_and_not_the_first_rows(tmp_path: Path) -> None:
    def dev() -> list[str]:
        return [task.question for task in vqa(tmp_path, yes_no_rows(200)).tasks("dev")]

    assert dev() == dev() != [f"question {number}" for number in range(10)]
    assert len(dev()) == 10


def test_rows_linked_through_other_rows_stay_together() -> None:
    a, b, c = b"a", b"b", b"c"
    images = [(a, b), (c,), (b, c), *((b"%d" % n,) for n in range(17))]
    for seed in range(30):
        sides = split_by_image(images, share=0.2, seed=seed)
        assert len({row in sides.held_out for row in range(3)}) == 1
        assert sorted(sides.kept + sides.held_out) == list(range(20))
        assert 0 < len(sides.held_out) <= 4


def test_later_rows_leave_the_order_of_the_others() -> None:
    images = [(b"%d" % n,) for n in range(100)]
    half, whole = (split_by_image(images[:n], share=0.5, seed=3).held_out for n in (50, 100))
    assert [row for row in whole if row < 50] == [row for row in half if row in whole]


def test_images_are_known_by_bytes_path_or_pixels(tmp_path: Path) -> None:
    pixels = np.zeros((4, 4, 3), dtype=np.uint8)
    for name in "ab":
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    cells = [pixels, Image.fromarray(pixels), *[picture(1)] * 2, *(str(tmp_path / f"{name}.png") for name in "ab"), 5]
    rows = open_rows([[{"image": cell} for cell in cells]])
    rows = type(rows)(rows._tables, image_root=str(tmp_path))
    hashes = list(image_hashes(rows, ["image"]))
    assert hashes[0] == hashes[1] != hashes[2] == hashes[3]
    assert hashes[4] != hashes[5], "a path is known by its name: the file is not opened"
    assert hashes[6] == (), "a bad row stops nothing here; its split counts it"


def test_places_are_split_by_picture_too(tmp_path: Path) -> None:
    nowhere = dict.fromkeys(("city", "lat", "lon"))
    rows = [{"image": picture(n // 4), "country": "France", **nowhere} for n in range(80)]
    environment = geospot(tmp_path, rows, dev_share=0.05, test_files=("no such file.parquet",))
    train, dev = list(environment.tasks("train")), list(environment.tasks("dev"))
    assert (len(train), len(dev)) == (76, 4)
    assert not images_of(train) & images_of(dev)
    with pytest.raises(DataError, match="no such file"):
        environment.tasks("test")
