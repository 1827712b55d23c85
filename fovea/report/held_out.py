"""Answers to held-out rows as JSON for the page, with thumbnails of the rows' images, which a run stores once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL.Image import Image
from pydantic import TypeAdapter

from fovea.evaluation.json_file import ANSWERS_FOLDER, answer_files, read_answers
from fovea.evaluation.records import (
    ANSWERED_ROW,
    AnsweredRow,
    ImageName,
    RecordedEpisode,
    RecordedImage,
    RecordedMessage,
    RecordedTurn,
)
from fovea.report.images import png_bytes, write_image
from fovea_gym.utils.bounded import read_file
from fovea_gym.utils.files import write_atomically
from fovea_gym.utils.stored import as_json, from_json, to_json

MAX_ROWS = 1000
"""Maximum number of an evaluation's rows that are sent to the page."""
MAX_CHARS = 2000
"""Maximum length of a question, a truth or an answer; longer texts are cut."""
MAX_EVALUATIONS = 200
"""Maximum number of evaluations that the page offers; every evaluation on the dev rows counts."""
MAX_PICTURED = 200
"""Maximum number of rows with pictures, in a run folder per split and in a page of `fovea eval`."""
MAX_PICTURES = 4
"""Maximum number of pictures per row."""
THUMBNAIL_PX = 384
"""Longer side of a picture, enough to recognise a row; images of training samples are stored larger."""


PICTURES = TypeAdapter(dict[str, tuple[ImageName, ...]])
"""Names of the pictures of each row, by row id."""


def evaluations(run_dir: Path) -> list[str]:
    """Names of the evaluations that have stored answers, the most important first."""
    return answer_files(run_dir)[:MAX_EVALUATIONS]


def answers_json(run_dir: Path, number: int) -> dict[str, Any]:
    """The name and the rows of evaluation `number` in the order of `evaluations`; IndexError if there is none."""
    name = evaluations(run_dir)[number]
    pictures = read_pictures(run_dir, name.partition("-")[0])
    rows = read_answers(run_dir, name, MAX_ROWS)
    return {"name": name, "rows": [row_json(row, pictures.get(row.id, ())) for row in rows]}


def row_json(row: AnsweredRow, pictures: Sequence[str]) -> Any:
    """A row as it is sent to the page: long texts are cut, and the prompt consists of the names of its pictures."""
    images = tuple(RecordedImage(name=name) for name in pictures)
    shown = replace(
        row,
        id=_cut(row.id),
        kind=_cut(row.kind),
        image_type=None if row.image_type is None else _cut(row.image_type),
        question=_cut(row.question),
        truth=_cut(row.truth),
        messages=(RecordedMessage(role="user", parts=images),) if images else (),
        answers=tuple(map(_cut_answer, row.answers)),
    )
    return as_json(ANSWERED_ROW, shown)


def _cut_answer(answer: RecordedEpisode) -> RecordedEpisode:
    def turn(each: RecordedTurn) -> RecordedTurn:
        return replace(each, text=_cut(each.text), messages=tuple(map(message, each.messages)))

    def message(each: RecordedMessage) -> RecordedMessage:
        parts = (_cut(part) if isinstance(part, str) else part for part in each.parts)
        return replace(each, tool=_cut(each.tool), parts=tuple(parts))

    return replace(answer, turns=tuple(map(turn, answer.turns)))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} ... ({len(text):,} characters)"


def thumbnails(images: Iterable[Image]) -> list[bytes]:
    """The first images of a row, downscaled to small PNG files."""
    return [png_bytes(image, THUMBNAIL_PX) for _, image in zip(range(MAX_PICTURES), images, strict=False)]


def write_pictures(run_dir: Path, split: str, pictures: Mapping[str, Sequence[bytes]]) -> None:
    """Store the pictures of a split's rows; `pictures` holds PNG files by row id."""
    names = {row: tuple(write_image(run_dir, png) for png in of_row) for row, of_row in pictures.items()}
    write_atomically(_pictures_file(run_dir, split), (to_json(PICTURES, names) + "\n").encode("ascii"))


def read_pictures(run_dir: Path, split: str) -> dict[str, tuple[str, ...]]:
    """Names of the stored pictures of a split, by row id; empty if it has none."""
    path = _pictures_file(run_dir, split)
    try:
        content = read_file(path, within=run_dir)
    except FileNotFoundError:
        return {}
    return from_json(PICTURES, content, f"{path} does not hold names of pictures")


def _pictures_file(run_dir: Path, split: str) -> Path:
    return run_dir / ANSWERS_FOLDER / f"pictures-{split}.json"
