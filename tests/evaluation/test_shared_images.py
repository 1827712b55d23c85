"""Test images that the training split has too."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fovea.data.pixel_hashes import pixel_hash, pixel_hashes
from fovea.data.prompt_source import PromptSource
from fovea.evaluation import controls
from fovea.evaluation.controls import SharedImages, find_shared_images
from fovea_gym.environments.shapes.environment import Shapes
from fovea_gym.errors import DataError
from fovea_gym.rows.images import ImageOpener
from fovea_gym.settings.environments import ShapesEnvironment
from fovea_gym.types import ImageRef, Task
from tests.environments.prompt_sources import opener, source_of


def search(
    test: PromptSource,
    train: PromptSource,
    sample_rows: int | None = None,
    say: Callable[[str], None] = lambda _: None,
    open_image: Callable[[ImageRef], Image.Image] = opener,
) -> SharedImages:
    return find_shared_images(test, train, lambda ref: pixel_hash(open_image(ref)), sample_rows=sample_rows, say=say)


def count(test: PromptSource, train: PromptSource) -> int:
    return search(test, train).shared


def grey(number: int, *values: int) -> Task:
    """A task with a picture of one grey value each."""
    pictures = tuple(ImageRef(source=np.full((4, 4, 3), value, dtype=np.uint8)) for value in values)
    return Task(id=str(number), question="q", answer="a", images=pictures)


def test_shared_images_are_found_pixel_for_pixel() -> None:
    test = source_of([grey(0, *values) for values in ((1,), (2,), (3, 4), ())])
    for train, shared in (([(9,), (4, 8)], 1), ([(1, 2), (3,)], 3), ([(5,)], 0)):
        assert count(test, source_of([grey(0, *values) for values in train])) == shared
    # an image of another shape is another image
    wide, tall = (ImageRef(source=np.zeros(shape, dtype=np.uint8)) for shape in ((2, 8, 3), (8, 2, 3)))
    tasks = [Task(id="0", question="q", answer="a", images=(ref,)) for ref in (wide, tall)]
    assert count(source_of(tasks[:1]), source_of(tasks[1:])) == 0


def test_a_sample_says_its_share_and_looks_at_nothing_else() -> None:
    class Counted(list[Task]):
        read = 0

        def __getitem__(self, index: int) -> Task:  # type: ignore[override]
            self.read += 1
            return super().__getitem__(index)

    train = Counted(grey(number, number) for number in range(200))
    test = [grey(number, number) for number in range(50)]
    said: list[str] = []
    found = search(source_of(test), source_of(train), 50, said.append)
    assert train.read == 50
    assert 0 < found.shared < 50
    searched = "searched: all 50 test rows, 50 of 200 (25 %) training rows"
    assert str(found) == f"{found.shared} test rows have an image that a training row has too ({searched})"
    assert said[0] == "looking for test images in the training split: 0 of 50 test rows"
    assert "looking for test images in the training split: 16 of 50 training rows" in said
    assert search(source_of(test), source_of(train), 50) == found, "the same sample every time"
    assert search(source_of(test), source_of(train)).shared == 50


def test_slow_images_cut_a_sample_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes connections and says nothing: each of 100 rows would take .2 s."""
    monkeypatch.setattr(controls, "MAX_SAMPLE_SECONDS", 1.0)

    def wait_for_it(ref: ImageRef) -> bytes:
        with socket.create_connection(silent.getsockname()) as connection:
            connection.settimeout(0.2)
            try:
                return connection.recv(1)
            except TimeoutError:
                raise DataError("the server says nothing") from None

    with socket.create_server(("127.0.0.1", 0), backlog=500) as silent:
        tasks = [grey(number, number) for number in range(100)]
        started = time.monotonic()
        found = find_shared_images(source_of(tasks), source_of(tasks), wait_for_it, sample_rows=99, say=lambda _: None)
        assert time.monotonic() - started < 10
        assert found.train.rows < 99
        assert found.shared == 0


def test_bad_rows_are_left_for_the_run_to_find() -> None:
    tasks = [grey(0, 7), Task(id="1", question="q", answer="a", images=(ImageRef(source="nowhere.png"),))]
    source, careful = source_of(tasks), ImageOpener(max_image_mib=1, max_image_megapixels=1)
    assert search(source, source_of(tasks), open_image=careful).shared == 1
    assert not source.bad_rows


def hashes(folder: Path, refs: Sequence[ImageRef], salt: str = "") -> tuple[list[bytes], int]:
    """The hashes of pictures, and how many of these were opened for them."""
    opened: list[object] = []
    plain = ImageOpener(max_image_mib=1, max_image_megapixels=1)

    def noted(ref: ImageRef) -> Image.Image:
        opened.append(ref.source)
        return plain(ref)

    with pixel_hashes(folder, noted, salt) as of:
        return [of(ref) for ref in refs], len(opened)


def test_hashes_are_kept_between_runs_by_content(tmp_path: Path) -> None:
    cache, file = tmp_path / "cache", tmp_path / "a.png"
    Image.new("RGB", (8, 8), "red").save(file)
    refs = [ImageRef(source=file.read_bytes()), ImageRef(source=str(file))]
    first, opened = hashes(cache, refs)
    assert (first[0], opened) == (first[1], 2)
    assert hashes(cache, [*refs, ImageRef(source=file.read_bytes(), where="elsewhere")]) == ([*first, first[0]], 0)
    assert hashes(cache, refs, "rotated")[1] == 2, "opened otherwise, other pixels"
    Image.new("RGB", (9, 9), "blue").save(file)
    changed, opened = hashes(cache, [ImageRef(source=str(file))])
    assert (changed[0] != first[0], opened) == (True, 1)


def test_a_cache_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "pixel_hashes.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(DataError, match=r"pixel_hashes\.sqlite cannot be used .* delete it, or set data\.cache_dir"):
        hashes(tmp_path, [ImageRef(source=b"x")])


def test_shapes_share_no_image_across_splits() -> None:
    environment = Shapes(ShapesEnvironment(train_size=400, dev_size=100, test_size=200), seed=3)
    train, dev, test = (source_of(environment.tasks(split)) for split in ("train", "dev", "test"))
    assert count(test, train) == count(test, dev) == 0
    assert count(dev, train) == 0
