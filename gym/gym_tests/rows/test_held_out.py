"""The choice of dev rows out of the training rows: by image, seeded, representative, and apart from the test rows."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fovea_gym.environments.file_splits import image_hashes, split_by_image
from fovea_gym.environments.geospot.environment import GeoSpot
from fovea_gym.environments.vqa import Vqa
from fovea_gym.errors import DataError
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.rows import open_rows
from fovea_gym.settings.environments import GeoSpotEnvironment, VqaEnvironment
from fovea_gym.types import Task


def png(number: int) -> bytes:
    """A separate picture for every number."""
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (number % 256, number // 256, 7)).save(buffer, "PNG")
    return buffer.getvalue()


def vqa(folder: Path, rows: list[dict[str, object]], **settings: object) -> Vqa:
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    test = [{"images": [png(60_000 + n)], "problem": "test", "answer": "test"} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(test), folder / "test.parquet")
    files = {f"{split}_files": (str(folder / f"{split}.parquet"),) for split in ("train", "test")}
    return Vqa(VqaEnvironment.model_validate({**files, **settings}), RowAccess())


def yes_no_rows(num: int = 1000, rows_per_image: int = 2) -> list[dict[str, object]]:
    """Yes and no in turn, as `fovea data vqa` draws them; several questions on each picture."""
    return [
        {"images": [png(n // rows_per_image)], "problem": f"question {n}", "answer": "no" if n % 2 else "yes"}
        for n in range(num)
    ]


def images_of(tasks: list[Task]) -> set[object]:
    return {image.source for task in tasks for image in task.images}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"images": ["absent.png"]}] * 60, r"row 0, image 1 \(.*absent\.png\): no such image file"),
        ([{"images": [png(1)]}] * 60, "the 60 training rows, or the remaining ones, share one image"),
        ([{"images": [png(1)]}], "there is a single training row"),
    ],
)
def test_why_no_row_can_be_held_out(rows: list[dict[str, object]], message: str, tmp_path: Path) -> None:
    environment = vqa(tmp_path, [{"problem": "question", "answer": "yes", **row} for row in rows], dev_share=0.2)
    with pytest.raises(DataError, match=message):
        environment.tasks("dev")


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
    cells = [pixels, Image.fromarray(pixels), png(1), png(1), str(tmp_path / "a.png"), str(tmp_path / "b.png"), 5]
    rows = open_rows([[{"image": cell} for cell in cells]])
    rows = type(rows)(rows._tables, image_root=str(tmp_path))
    hashes = list(image_hashes(rows, ["image"]))
    assert hashes[0] == hashes[1] != hashes[2] == hashes[3]
    assert hashes[4] != hashes[5], "a path is known by its name: the file is not opened"
    assert hashes[6] == (), "a bad row stops nothing here; its split counts it"


def test_rows_that_share_one_image_cannot_be_split(tmp_path: Path) -> None:
    environment = vqa(tmp_path, yes_no_rows(10, rows_per_image=10))
    assert len(environment.tasks("train")) == 10
    with pytest.raises(DataError, match=r"share one image, .* set dev_files, or dev_share=0"):
        environment.tasks("dev")
    assert len(vqa(tmp_path, yes_no_rows(10, rows_per_image=10), dev_share=0).tasks("dev")) == 0


def test_places_are_split_by_picture_too(tmp_path: Path) -> None:
    rows = [{"image": png(n // 4), "country": "France", "city": None, "lat": None, "lon": None} for n in range(80)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    files = (str(tmp_path / "rows.parquet"),)
    environment = GeoSpot(GeoSpotEnvironment(train_files=files, test_files=("no such file.parquet",)), RowAccess())
    train, dev = list(environment.tasks("train")), list(environment.tasks("dev"))
    assert (len(train), len(dev)) == (76, 4)
    assert not images_of(train) & images_of(dev)
    with pytest.raises(DataError, match="no such file"):
        environment.tasks("test")
