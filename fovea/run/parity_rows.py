"""The rows of the parity gate: the first training rows that can be used, looked for aloud and within a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from fovea.environments.base import Environment
from fovea.environments.prompt_source import PromptedTask, PromptSource
from fovea.errors import DataError
from fovea.types import ImageRef, Message

PromptKind = Literal["with images", "without images"]
MAX_ROWS_TRIED = 1000
"""Training rows that are tried before giving up on bad ones."""


def usable_prompts(
    source: PromptSource,
    environment: Environment,
    num_rows: int,
    *,
    max_seconds: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[tuple[PromptKind, PromptedTask]]:
    """Prompts of the first `num_rows` usable training rows, with and without their images.

    `say` is told of every row that cannot be used. After `max_seconds` the rows found so far are all; DataError where
    there are none.
    """
    prompts = list[tuple[PromptKind, PromptedTask]]()
    rows, tried, end, last_error = 0, 0, clock() + max_seconds, ""
    while rows < num_rows and tried < min(len(source), MAX_ROWS_TRIED) and (tried == 0 or clock() < end):
        try:
            task = source.tasks[tried]
            whole, bare = source.render(task), source.render(task, without_images(environment.prompt(task)))
        except DataError as error:
            # not reported as bad here: the run does so when its data order comes to them
            last_error = str(error)
            say(f"parity gate: {rows} of {num_rows} rows found among {tried + 1} tried; {last_error}")
        else:
            # later turns may have images too
            prompts += [("with images", whole)] if whole.prompt.images or environment.max_turns > 1 else []
            prompts.append(("without images", bare))
            rows += 1
        tried += 1
    if not prompts:
        raise DataError(_none_found(tried, last_error, clock() >= end, max_seconds))
    return prompts


def _none_found(tried: int, last_error: str, late: bool, max_seconds: float) -> str:
    within = f" in parity.max_search_seconds={max_seconds:g}" if late else ""
    return f"none of the first {tried} training rows can be used{within}, the last one: {last_error}"


def without_images(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages without their images."""
    return tuple(
        replace(message, parts=tuple(part for part in message.parts if not isinstance(part, ImageRef)))
        for message in messages
    )
