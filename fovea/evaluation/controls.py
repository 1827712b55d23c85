"""Image ablations with shuffled and with blank images, and a search for images that two splits share."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fovea.data.prompt_source import PromptSource
from fovea_gym.rows.images import OpenImage
from fovea_gym.types import ImageRef, Message, Task

GREY = 128
Say = Callable[[str], None]


def usable_tasks(source: PromptSource, size: int) -> list[Task]:
    """The tasks of the first `size` rows; bad rows are left out."""
    rows = (source.get(index) for index in range(size))
    return [row.task for row in rows if row is not None]


def pictured_tasks(source: PromptSource, size: int, say: Say) -> list[Task]:
    """The tasks that have images; `say` gets a line if other tasks are left out that may show pictures in replies."""
    tasks = usable_tasks(source, size)
    found = [task for task in tasks if task.images]
    if source.has_replies and len(found) < len(tasks):
        say(
            f"image controls: {len(tasks) - len(found)} of {len(tasks)} rows are left out, since their tasks have no "
            "`images`; pictures in their replies are not replaced"
        )
    return found


def image_controls(
    source: PromptSource, tasks: Sequence[Task], open_image: OpenImage
) -> tuple[PromptSource, PromptSource]:
    """Create two sources of `tasks`, with shuffled and with blank images; pictures in replies are replaced too.

    The first source replaces a reply's picture by an image of a random row, scaled to the picture's size. The image
    differs from the picture unless all images of the rows are equal to it.
    """
    shuffled = with_shuffled_images(tasks)
    pool = [image for task in shuffled for image in task.images]

    def another(ref: ImageRef, where: str) -> ImageRef:
        seen, start = open_image(ref), random.Random(where).randrange(len(pool))
        seen_YXC = _pixels(seen)
        candidates = (pool[(start + step) % len(pool)] for step in range(len(pool)))
        others = (_pixels(open_image(candidate).resize(seen.size)) for candidate in candidates)
        return replace(ref, source=next((other for other in others if not np.array_equal(other, seen_YXC)), seen_YXC))

    return (
        source.with_tasks(shuffled, partial(_with_pictures, another)),
        source.with_tasks(
            with_blank_images(tasks, open_image), partial(_with_pictures, lambda ref, _: _blank(ref, open_image))
        ),
    )


def _with_pictures(
    other: Callable[[ImageRef, str], ImageRef], messages: Sequence[Message], where: str
) -> Sequence[Message]:
    """Replace the pictures of messages by `other(picture, name of its place)`."""

    def exchanged(row: int, message: Message) -> Message:
        parts = (
            other(part, f"{where}, message {row}, part {place}") if isinstance(part, ImageRef) else part
            for place, part in enumerate(message.parts)
        )
        return replace(message, parts=tuple(parts))

    return [exchanged(row, message) for row, message in enumerate(messages)]


def with_shuffled_images(tasks: Sequence[Task], seed: int = 0) -> list[Task]:
    """Replace the images of each task by those of another task of the same kind and number of images.

    Tasks for which no other task has different images are left out.
    """
    pools: dict[tuple[str, int], list[Task]] = defaultdict(list)
    for task in tasks:
        pools[task.kind, len(task.images)].append(task)
    return [task for pool in pools.values() for task in _shuffled(pool, seed)]


def _shuffled(pool: Sequence[Task], seed: int) -> Iterator[Task]:
    order = list(pool)
    random.Random(seed).shuffle(order)
    for place, task in enumerate(order):
        # every task gets its successor's images, or those of the next task with different images
        others = (order[(place + step) % len(order)] for step in range(1, len(order)))
        other = next((other for other in others if not _same_images(task, other)), None)
        if other is not None:
            yield replace(task, images=other.images)


def _same_images(first: Task, second: Task) -> bool:
    """True if the images of two tasks are the same objects or have equal content."""
    pairs = zip(first.images, second.images, strict=True)
    return all(a.source is b.source or np.array_equal(np.asarray(a.source), np.asarray(b.source)) for a, b in pairs)


def with_blank_images(tasks: Sequence[Task], open_image: OpenImage) -> list[Task]:
    """The tasks with their images replaced by grey ones of the same size."""
    return [replace(task, images=tuple(_blank(ref, open_image) for ref in task.images)) for task in tasks]


def _blank(ref: ImageRef, open_image: OpenImage) -> ImageRef:
    width, height = open_image(ref).size
    # broadcast one value: the blank images of the whole split are in memory at once
    return replace(ref, source=np.broadcast_to(np.uint8(GREY), (height, width, 3)))


def _pixels(image: Image.Image) -> NDArray[np.uint8]:
    """The RGB values of an image, [height, width, 3]."""
    return np.asarray(image.convert("RGB"))


PixelHash = Callable[[ImageRef], bytes]
"""A function that hashes the size and the pixels of an image; DataError if it cannot be opened."""
MAX_SAMPLE_SECONDS = 300.0
"""Time limit for sampling one split: if images load slowly, the sample gets smaller, and its share is printed."""
_SAY_EVERY_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """How many of the `of` rows of a split were searched."""

    rows: int
    of: int

    @property
    def share(self) -> float:
        return self.rows / max(self.of, 1)

    def __str__(self) -> str:
        if self.rows == self.of:
            return f"all {self.of:,}"
        return f"{self.rows:,} of {self.of:,} ({100 * self.share:.3g} %)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedImages:
    """The result of a search for images that two splits share."""

    shared: int
    """Number of searched test rows with an image that a searched training row also has; bad rows do not count."""
    test: Searched
    train: Searched

    def __str__(self) -> str:
        searched = f"searched: {self.test} test rows, {self.train} training rows"
        return f"{self.shared} test rows have an image that a training row has too ({searched})"


def find_shared_images(
    test: PromptSource, train: PromptSource, pixel_hash: PixelHash, *, sample_rows: int | None, say: Say
) -> SharedImages:
    """Search `sample_rows` random rows of each split, None for all; equal numbers of rows give equal samples."""

    def hashed(source: PromptSource, split: str) -> list[set[bytes]]:
        said = f"looking for test images in the training split: {{count}} {split} rows"
        return _hashed(source, pixel_hash, sample_rows, lambda count: say(said.format(count=count)))

    of_test, of_train = hashed(test, "test"), hashed(train, "training")
    shared = set().union(*of_test) & set().union(*of_train)
    return SharedImages(
        shared=sum(bool(hashes & shared) for hashes in of_test),
        test=Searched(rows=len(of_test), of=len(test)),
        train=Searched(rows=len(of_train), of=len(train)),
    )


def _hashed(source: PromptSource, pixel_hash: PixelHash, sample_rows: int | None, say: Say) -> list[set[bytes]]:
    """The hashes of the images of each row that was searched."""

    def hashes(index: int) -> set[bytes]:
        return {pixel_hash(ref) for ref in source.tasks[index].images}

    found, indices = list[set[bytes]](), _sampled(len(source), sample_rows)
    end = time.monotonic() + MAX_SAMPLE_SECONDS
    for number, index in enumerate(indices):
        if sample_rows is not None and time.monotonic() > end:
            break
        if number % _SAY_EVERY_ROWS == 0:
            say(f"{number:,} of {len(indices):,}")
        found.append(source.peek(partial(hashes, index)) or set())
    return found


def _sampled(num_rows: int, sample_rows: int | None) -> Sequence[int]:
    if sample_rows is None or sample_rows >= num_rows:
        return range(num_rows)
    # in the order of the files, since these are read block by block
    return sorted(random.Random(0).sample(range(num_rows), sample_rows))
