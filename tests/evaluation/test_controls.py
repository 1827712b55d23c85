"""Controls of an accuracy, and the count of images on both sides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from fovea.config.environments import ShapesEnvironment
from fovea.data.images import ImageOpener
from fovea.environments.shapes.environment import Shapes
from fovea.evaluation.controls import usable_tasks, with_blank_images, with_shuffled_images
from fovea.models.render import Renderer
from fovea.types import ImageRef, Task
from tests.environments.prompt_sources import opener, source_of
from tests.tiny_models import tiny


def test_shuffled_images_are_those_of_other_tasks_of_the_kind() -> None:
    tasks = list(Shapes(ShapesEnvironment(test_size=40), seed=0).tasks("test"))
    shuffled = sorted(with_shuffled_images(tasks), key=lambda task: int(task.id.split("/")[1]))
    for before, after in zip(tasks, shuffled, strict=True):
        assert (before.question, before.answer) == (after.question, after.answer)
        assert before.images[0] is not after.images[0]
    for kind in {task.kind for task in tasks}:
        owned = {id(task.images[0]) for task in tasks if task.kind == kind}
        assert {id(task.images[0]) for task in shuffled if task.kind == kind} == owned


def test_tasks_with_several_images_swap_with_tasks_that_have_as_many() -> None:
    images = [ImageRef(source=np.full((8, 8, 3), index, dtype=np.uint8)) for index in range(9)]
    counts = [1, 2, 1, 2, 0, 3]
    tasks = [Task(id=str(i), question="q", answer="a", images=tuple(images[i : i + n])) for i, n in enumerate(counts)]
    shuffled = {task.id: len(task.images) for task in with_shuffled_images(tasks)}
    assert shuffled == {"0": 1, "2": 1, "1": 2, "3": 2}, "the others have nobody to swap with"


def test_a_shuffled_image_is_never_the_same_picture() -> None:
    """Rows of a data set often share one."""
    pictures = [ImageRef(source=bytes([value])) for value in (1, 1, 1, 2, 2, 3)]
    tasks = [Task(id=str(i), question="q", answer="a", images=(ref,)) for i, ref in enumerate(pictures)]
    shuffled = with_shuffled_images(tasks)
    assert len(shuffled) == 6
    for task in shuffled:
        assert task.images[0].source != pictures[int(task.id)].source


def test_blank_images_keep_their_size_and_nothing_else() -> None:
    task = Task(id="0", question="q", answer="a", images=(ImageRef(source=np.zeros((6, 9, 3), dtype=np.uint8)),))
    (blank,) = with_blank_images([task], opener)
    assert opener(blank.images[0]).size == (9, 6)
    assert len(np.unique(np.asarray(blank.images[0].source))) == 1


def test_blank_images_of_large_photos_hold_no_pixels(tmp_path: Path) -> None:
    """Those of all test rows are held at once."""
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    task = Task(id="0", question="q", answer="a", images=(ImageRef(source=str(tmp_path / "a.png")),))
    open_image = ImageOpener(max_mib=1, max_megapixels=1)
    (blank,) = with_blank_images([task], open_image)
    source = blank.images[0].source
    assert isinstance(source, np.ndarray)
    assert source.strides == (0, 0, 0)
    assert open_image.size(blank.images[0]) == (40, 30)
    assert open_image(blank.images[0]).getcolors() == [(1200, (128, 128, 128))]


def test_rows_that_cannot_be_read_are_left_out_of_controls() -> None:
    """The second image is a file that is not there."""
    images = [ImageRef(source=np.full((8, 8, 3), 7, dtype=np.uint8)), ImageRef(source="nowhere.png", where="row 1")]
    tasks = [Task(id=str(index), question="q", answer="a", images=(ref,)) for index, ref in enumerate(images)]

    careful_opener = ImageOpener(max_mib=1, max_megapixels=1)
    renderer = Renderer(tiny("qwen3_vl").processor, careful_opener)
    test = source_of(tasks, renderer)
    assert usable_tasks(test, 2) == tasks[:1]
    assert list(test.bad_rows) == [1]
