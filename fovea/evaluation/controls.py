"""Image ablations: shuffled and blank images."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from fovea.data.images import OpenImage
from fovea.environments.prompt_source import PromptSource
from fovea.types import ImageRef, Task

GREY = 128


def usable_tasks(source: PromptSource, size: int) -> list[Task]:
    """Tasks of the first `size` rows, bad rows left out."""
    rows = (source.get(index) for index in range(size))
    return [row.task for row in rows if row is not None]


def with_shuffled_images(tasks: Sequence[Task], seed: int = 0) -> list[Task]:
    """Tasks with their images replaced by those of another task of the same kind and number of images.

    A task without a partner whose images differ is left out.
    """
    pools: dict[tuple[str, int], list[Task]] = defaultdict(list)
    for task in tasks:
        pools[task.kind, len(task.images)].append(task)
    return [task for pool in pools.values() for task in _shuffled(pool, seed)]


def _shuffled(pool: Sequence[Task], seed: int) -> Iterator[Task]:
    order = list(pool)
    random.Random(seed).shuffle(order)
    for place, task in enumerate(order):
        # every task has its successor's images; the one after that where a data set shares one picture between rows
        others = (order[(place + step) % len(order)] for step in range(1, len(order)))
        other = next((other for other in others if not _same_images(task, other)), None)
        if other is not None:
            yield replace(task, images=other.images)


def _same_images(first: Task, second: Task) -> bool:
    """Whether two tasks have the same images, by identity or content of their sources."""
    pairs = zip(first.images, second.images, strict=True)
    return all(a.source is b.source or np.array_equal(np.asarray(a.source), np.asarray(b.source)) for a, b in pairs)


def with_blank_images(tasks: Sequence[Task], open_image: OpenImage) -> list[Task]:
    """Tasks with their images replaced by grey ones of the same size."""
    return [replace(task, images=tuple(_blank(image, open_image) for image in task.images)) for task in tasks]


def _blank(ref: ImageRef, open_image: OpenImage) -> ImageRef:
    width, height = open_image(ref).size
    # one value seen from everywhere: those of all test images are held at once
    return replace(ref, source=np.broadcast_to(np.uint8(GREY), (height, width, 3)))
