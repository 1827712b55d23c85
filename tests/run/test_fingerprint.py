"""What changed between a checkpoint and its resume is named, whether it is a row, a file, code or a library."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fovea.config.run import Config
from fovea.loop import train
from fovea.run.fingerprint import MAX_ROWS, Fingerprint, changes, check_unchanged, checksum, model_files, row_texts
from fovea.wiring.run import build
from fovea_gym.errors import DataError
from fovea_gym.rows.tasks import LazyTasks
from fovea_gym.types import ImageRef, Task
from gym_tests.tables import table

REWARD = """\
import numpy, helpers.words

def right(task, text, images):
    return float(task.answer in text)
"""


def write_rows(file: Path, answers: str = "0123456789", picture: int = 0) -> None:
    images = file.parent / "images"
    images.mkdir(exist_ok=True)
    pixels = np.random.default_rng(picture).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(images / f"{file.stem}.png")
    image = [f"images/{file.stem}.png"]
    rows = [{"problem": f"What is {n}?", "answer": answer, "images": image} for n, answer in enumerate(answers)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings(**more: Any) -> Config:
    """With relative paths, so that a folder can be copied."""
    given = {
        "model": {"path": "model"} if Path("model").exists() else {"tiny": {}},
        "environment": {"name": "geo3k", "train_files": ["train.jsonl"], "test_files": ["test.jsonl"], "dev_share": 0},
        "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_new_tokens": 2},
        "evaluate": {"test_size": 2, "image_controls": False, "shared_images": "ignore"},
        "log": {"tensorboard": False, "progress": False},
        **{"reward": "own.py:right", "run_dir": "run", "max_steps": 1, "parity": {"prompts": 0}},
    }
    return Config.model_validate(given | more)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    for split in ("train", "test"):
        write_rows(folder / f"{split}.jsonl")
    (folder / "own.py").write_text(REWARD)
    (folder / "helpers").mkdir()
    (folder / "helpers" / "__init__.py").touch()
    (folder / "helpers" / "words.py").write_text("def score():\n    from .rules import WEIGHT\n")
    (folder / "helpers" / "rules.py").write_text("import numpy\nWEIGHT = 1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        maker = build(settings(run_dir="maker"))
        shutil.copytree("maker/model", "model")
        maker.held.close()  # deletes the folder, as no step was taken
        train(build(settings()))
    return folder


def swapped_rows(folder: Path) -> None:
    rows = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join([rows[1], rows[0], *rows[2:]]))


def flipped_weight(folder: Path) -> None:
    weights = folder / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 0x40
    weights.write_bytes(content)


def put(name: str, old: str, new: str) -> Callable[[Path], int]:
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new, 1))


SINCE = "have changed since its checkpoint:"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda folder: write_rows(folder / "train.jsonl", "0123456780"), r"train row 9 \(train\.jsonl line \d+\) was"),
        (swapped_rows, r"train row 0 \(train\.jsonl line \d+\) was [0-9a-f]+ and is [0-9a-f]+; train row 1 \("),
        (lambda folder: write_rows(folder / "train.jsonl", "01234567891"), "number of train rows was 10 and is 11"),
        (lambda folder: write_rows(folder / "test.jsonl", "9123456789"), r"test row 0"),
        (lambda folder: write_rows(folder / "train.jsonl", picture=1), r"train row 0 .*; and 7 more; restore them"),
        (put("own.py", "float(", "1 - float("), rf"inputs of this run {SINCE} code of reward=.*own\.py:right was \d"),
        # in a module that a module of the reward's imports, when it is called
        (put("helpers/rules.py", "1", "2"), r"reward=own\.py:right, its import helpers/rules\.py was \d+ bytes"),
        (flipped_weight, r"checkpoint: file of the model model\.safetensors was (\d+) bytes, .* and is \1 bytes, "),
        (put("model/tokenizer.json", "{", " {"), r"checkpoint: file of the model tokenizer\.json was"),
    ],
    ids=["answer", "order", "number", "test row", "image", "reward", "import", "weights", "tokenizer"],
)
def test_what_changed_is_named_and_may_be_allowed(
    change: Callable[[Path], object], named: str, begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(begun, folder)
    monkeypatch.chdir(folder)
    change(folder)
    with pytest.raises(DataError, match=rf"{named}.*resume_changed=allow to continue with the changed ones, or"):
        build(settings(resume="auto"))
    build(settings(resume="auto", resume_changed="allow")).held.close()


def test_what_is_the_same_goes_on(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(begun, tmp_path / "copy", copy_function=shutil.copyfile)
    monkeypatch.chdir(tmp_path / "copy")
    run = build(settings(resume="auto", max_steps=2))
    assert run.resumed is not None
    assert train(run).steps == 2


def test_other_versions_of_libraries_stop_a_run_and_patches_are_said() -> None:
    before = {"library torch": "2.9.0", "library transformers": "5.1.0", "row": "1"}
    said: list[str] = []
    check_unchanged(before, before, allow=False, say=said.append)
    assert said == []
    check_unchanged(before, before | {"library torch": "2.9.1+cpu"}, allow=False, say=said.append)
    assert said == ["inputs have changed since the checkpoint: library torch was 2.9.0 and is 2.9.1+cpu"]
    with pytest.raises(DataError, match=r"checkpoint: library transformers was 5\.1\.0 and is 5\.2\.0; restore them"):
        check_unchanged(before, before | {"library transformers": "5.2.0"}, allow=False, say=said.append)


def test_what_comes_and_goes_is_a_change_too() -> None:
    found = list(map(str, changes({"a": "1", "b": "2"}, {"b": "2", "c": "3"})))
    assert found == ["a was 1 and is absent", "c was absent and is 3"]


def row(index: int, **more: Any) -> Task:
    return Task(id=f"train/{index}", question="How many?", answer=str(index), **more)


def rows(tasks: Sequence[Task]) -> Fingerprint:
    return dict(row_texts("train", tasks))


def test_rows_made_on_access_are_sampled_and_a_list_is_not() -> None:
    made: list[int] = []

    def make(index: int) -> Task:
        made.append(index)
        return row(index)

    assert len(rows(LazyTasks(make, range(100_000), kind_of=lambda _: "all"))) == MAX_ROWS + 1
    assert (len(made), made[0], made[-1]) == (MAX_ROWS, 0, 99_999)
    tasks = [row(index) for index in range(3 * MAX_ROWS)]
    changed = [*tasks[:17], row(17, kind="other"), *tasks[18:]]
    assert [change.name for change in changes(rows(tasks), rows(changed))] == ["train row 17"]


DARK = ImageRef(source=Image.new("RGB", (2, 2)))


@table(
    ("one", "other"),
    [
        ({"row": {"level": 1}}, {"row": {"level": 2}}),
        ({"row": {"level": 1}}, {"row": {"grade": 1}}),
        ({"row": {"a": "xy", "b": ""}}, {"row": {"a": "x", "b": "y"}}),
        ({"images": (ImageRef(source=b"1"),)}, {"images": (ImageRef(source=b"2"),)}),
        ({"images": (ImageRef(source="https://a/1.png"),)}, {"images": (ImageRef(source="https://a/2.png"),)}),
        ({"images": (ImageRef(source=np.zeros((2, 3, 3), dtype=np.uint8)),)}, {"images": ()}),
        ({"images": (DARK,)}, {"images": (replace(DARK, source=Image.new("RGB", (2, 2), (0, 0, 1))),)}),
    ],
)
def test_every_part_of_a_row_counts(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert rows([row(1, **one)]) == rows([row(1, **one)])
    assert len(changes(rows([row(1, **one)]), rows([row(1, **other)]))) == 1


def test_a_bad_row_is_one_and_a_missing_image_too(tmp_path: Path) -> None:
    def bad(index: int) -> Task:
        raise DataError("bad")

    assert rows(LazyTasks(bad, range(1), kind_of=lambda _: "all"))["train row 0"] == "a bad row"
    missing = row(1, images=(ImageRef(source=str(tmp_path / "none.png")),))
    (tmp_path / "some.png").write_bytes(b"1")
    there = row(1, images=(ImageRef(source=str(tmp_path / "some.png")),))
    assert len(changes(rows([missing]), rows([there]))) == 1


def test_of_a_large_file_evenly_spaced_blocks_are_read(tmp_path: Path) -> None:
    """A change in one of them is seen, one between them is not; the size always is."""
    file = tmp_path / "weights"
    content = bytearray(64 * 2**20)
    file.write_bytes(content)
    before = checksum(file, 4 * 2**20)
    assert re.fullmatch(rf"{64 * 2**20} bytes, .* in part", before)
    for at, seen in ((0, True), (-1, True), (10 * 2**20, False)):
        content[at] = 1
        file.write_bytes(content)
        assert (checksum(file, 4 * 2**20) != before) is seen
        content[at] = 0
    file.write_bytes(content[:-1])
    assert checksum(file, 4 * 2**20) != before


def test_the_files_of_a_reward_model_beside_the_rules_count(tmp_path: Path) -> None:
    for name in ("policy", "judge"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    scorer = {"model_reward": {"reward_model": 0.5}, "reward_model": {"path": str(tmp_path / "judge")}}
    graded = settings(model={"path": str(tmp_path / "policy")}, **scorer)
    assert dict(model_files(graded, graded.model)) == {
        "file of the model config.json": tmp_path / "policy" / "config.json",
        "file of the reward model config.json": tmp_path / "judge" / "config.json",
    }
