"""The turns of an answer as report.html shows them: the messages of the environment, and the texts of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from fovea.report.images import read_image
from fovea.report.records import RecordedAnswer, RecordedImage, RecordedMessage, RecordedTurn, SampleRecord

MAX_TURN_IMAGES = 4
"""Images that the environment added, embedded of one answer; a bound on the size of the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPart:
    """A part of a message: its text, an image (PNG file), or a note in place of an image that is not embedded."""

    text: str = ""
    image: bytes | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownMessage:
    """A message of the environment between two answers of the model."""

    role: str
    parts: tuple[ShownPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTurn:
    """The text of the model, and the messages before it (none in the first turn, whose prompt is shown above)."""

    messages: tuple[ShownMessage, ...] = ()
    text: str


def shown_turns(run_dir: Path, record: SampleRecord, answer: RecordedAnswer) -> tuple[ShownTurn, ...]:
    """The turns of an answer, one where a record of an older version kept the last text only."""
    places = count(1)
    prompt = {image.name: place for place, image in enumerate(record.images, start=1)}
    turns = answer.turns or (RecordedTurn(text=answer.score.text),)
    return tuple(
        ShownTurn(
            messages=tuple(_message(run_dir, message, prompt, places) for message in turn.messages), text=turn.text
        )
        for turn in turns
    )


def _message(run_dir: Path, message: RecordedMessage, prompt: dict[str, int], places: Iterator[int]) -> ShownMessage:
    parts = (
        ShownPart(text=part) if isinstance(part, str) else _image(run_dir, part, prompt, places)
        for part in message.parts
    )
    return ShownMessage(role=message.role, parts=tuple(parts))


def _image(run_dir: Path, image: RecordedImage, prompt: dict[str, int], places: Iterator[int]) -> ShownPart:
    """An image of a message; those of the prompt stand beside the answers already."""
    if image.name in prompt:
        return ShownPart(note=f"image {prompt[image.name]} of the prompt")
    if next(places) > MAX_TURN_IMAGES:
        return ShownPart(note="another image, which `fovea view` shows")
    png = read_image(run_dir, image.name)
    return ShownPart(image=png) if png else ShownPart(note="an image whose file in samples/images is gone")
