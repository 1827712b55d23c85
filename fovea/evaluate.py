"""Greedy accuracy on held-out rows, and the controls that tell seeing from guessing."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from PIL.Image import Image

from fovea.environments.base import Environment
from fovea.prompts import PromptedTask, PromptSource
from fovea.rollout.base import Engine
from fovea.rollout.collect import collect
from fovea.rollout.wait import wait_for
from fovea.types import Evaluation, Group, ImageRef, Sampling, Task

OpenImage = Callable[[ImageRef], Image]
GREY = 128


class Evaluator:
    """Asks an engine every question of a source once, greedily."""

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        *,
        max_new_tokens: int,
        stop: tuple[str, ...],
        batch_size: int,
    ) -> None:
        self._engine = engine
        self._environment = environment
        self._sampling = Sampling(max_new_tokens=max_new_tokens, temperature=0.0, stop=stop)
        self._batch_size = batch_size

    def evaluate(self, source: PromptSource, size: int | None = None) -> Evaluation:
        """Accuracies by question type over the first `size` rows that are usable."""
        return wait_for(self._evaluate(source, min(size or len(source), len(source))))

    async def _evaluate(self, source: PromptSource, size: int) -> Evaluation:
        accuracies: dict[str, list[float]] = defaultdict(list)
        for start in range(0, size, self._batch_size):
            rows = (source.get(index) for index in range(start, min(start + self._batch_size, size)))
            for group in await self._groups([row for row in rows if row is not None]):
                episode = group.episodes[0]
                accuracies[episode.task.kind].append(episode.score.accuracy)
        return Evaluation(accuracies={kind: tuple(accuracies[kind]) for kind in sorted(accuracies)})

    async def _groups(self, rows: Sequence[PromptedTask]) -> list[Group]:
        return await collect(self._engine, self._environment, rows, sampling=self._sampling, n=1, seed=(0,))


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
