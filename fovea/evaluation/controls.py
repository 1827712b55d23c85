"""The controls that tell seeing from guessing, and the count of images on both sides of a split."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from PIL.Image import Image

from fovea.data.images import OpenImage
from fovea.environments.prompt_source import PromptSource
from fovea.types import ImageRef, Task

GREY = 128


def usable_tasks(source: PromptSource, size: int) -> list[Task]:
    """The tasks of the first `size` rows, without those that are bad."""
    rows = (source.get(index) for index in range(size))
    return [row.task for row in rows if row is not None]


def with_shuffled_images(tasks: Sequence[Task], seed: int = 0) -> list[Task]:
    """Tasks with the images of another one of their kind and number of images.

    A task for which no other has different images is left out: with its own it would be no control.
    """
    pools: dict[tuple[str, int], list[Task]] = defaultdict(list)
    for task in tasks:
        pools[task.kind, len(task.images)].append(task)
    return [task for pool in pools.values() for task in _shuffled(pool, seed)]


def _shuffled(pool: Sequence[Task], seed: int) -> Iterator[Task]:
    order = list(pool)
    random.Random(seed).shuffle(order)
    for place, task in enumerate(order):
        others = (order[(place + step) % len(order)] for step in range(1, len(order)))
        other = next((other for other in others if not _same_images(task, other)), None)
        if other is not None:
            yield replace(task, images=other.images)


def _same_images(first: Task, second: Task) -> bool:
    """Rows of a data set often share a picture."""
    pairs = zip(first.images, second.images, strict=True)
    return all(a.source is b.source or np.array_equal(np.asarray(a.source), np.asarray(b.source)) for a, b in pairs)


def with_blank_images(tasks: Sequence[Task], open_image: OpenImage) -> list[Task]:
    """Every task with grey images of the same sizes."""
    return [replace(task, images=tuple(_blank(image, open_image) for image in task.images)) for task in tasks]


def _blank(ref: ImageRef, open_image: OpenImage) -> ImageRef:
    width, height = open_image(ref).size
    return replace(ref, source=np.full((height, width, 3), GREY, dtype=np.uint8))


def count_shared_images(test: PromptSource, train: PromptSource, open_image: OpenImage) -> int:
    """Test rows with an image that some training row also has, pixel for pixel; bad rows have none."""
    hashes_of_test = list(_hashes_by_row(test, open_image))
    shared = set().union(*hashes_of_test) & set().union(*_hashes_by_row(train, open_image))
    return sum(bool(hashes & shared) for hashes in hashes_of_test)


def _hashes_by_row(source: PromptSource, open_image: OpenImage) -> Iterator[set[bytes]]:
    def hashes(index: int) -> set[bytes]:
        return {_pixel_hash(open_image(ref)) for ref in source.tasks[index].images}

    for index in range(len(source)):
        yield source.read(index, partial(hashes, index)) or set()


def _pixel_hash(image: Image) -> bytes:
    size = f"{image.width}x{image.height}".encode()
    return hashlib.blake2b(image.tobytes(), digest_size=16, person=size[:16]).digest()
