"""Answers to held-out rows as JSON for the page, with small pictures of the rows, which a run stores once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL.Image import Image

from fovea.evaluation.answer import SampledAnswer
from fovea.evaluation.comparison import EvalRow
from fovea.evaluation.json_file import ANSWERS_FOLDER, HeldOutAnswer, answer_files, read_answers
from fovea.report.images import image_path, png_bytes, write_image
from fovea.report.record_json import answer_to_json
from fovea.report.records import RecordedAnswer, RecordedMessage, RecordedTurn
from fovea_gym.errors import DataError
from fovea_gym.utils.bounded import read_file
from fovea_gym.utils.files import write_atomically

MAX_ROWS = 1000
"""Answers of an evaluation that the page gets."""
MAX_CHARS = 2000
"""Of a question, a truth or an answer."""
MAX_EVALUATIONS = 200
"""Evaluations that the page offers; a run has one per dev reading."""
MAX_PICTURED = 200
"""Rows of a split whose pictures are stored, and rows of a page of `fovea eval` that have them."""
MAX_PICTURES = 4
"""Of a row."""
THUMBNAIL_PX = 384
"""Longer side of a picture, in which a row is recognised; samples of training are stored larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """A held-out row with the answer of one run or target."""

    id: str
    kind: str
    image_type: str | None
    question: str
    truth: str
    answer: SampledAnswer
    images: tuple[str, ...] = ()
    """Names of its pictures."""
    index: int = -1
    """Position in its split; -1 where it is not known."""


def evaluations(run_dir: Path) -> list[str]:
    """Names of the evaluations with answers, the most telling first."""
    return answer_files(run_dir)[:MAX_EVALUATIONS]


def answers_json(run_dir: Path, number: int) -> dict[str, Any]:
    """The name and the rows of the evaluation with this place in `evaluations`; IndexError where there is none."""
    name = evaluations(run_dir)[number]
    pictures = read_pictures(run_dir, name.partition("-")[0])
    rows = [shown(row, row.answer, pictures.get(row.id, ())) for row in read_answers(run_dir, name, MAX_ROWS)]
    return {"name": name, "rows": list(map(row_json, rows))}


def row_json(row: ShownRow) -> dict[str, Any]:
    """A row as the page gets it; its answer has the shape of a recorded one."""
    answer = replace(row.answer, text=_cut(row.answer.text))
    return {
        "id": _cut(row.id),
        "kind": _cut(row.kind),
        "image_type": row.image_type,
        "question": _cut(row.question),
        "truth": _cut(row.truth),
        "images": list(row.images),
        "index": row.index,
        "answer": answer_to_json(RecordedAnswer(score=answer, turns=_turns(row.answer))),
    }


def _turns(answer: SampledAnswer) -> tuple[RecordedTurn, ...]:
    """The turns of an answer of several, each with the messages of the environment before it."""
    turns, messages = list[RecordedTurn](), list[RecordedMessage]()
    for said in answer.turns:
        if said.role == "assistant":
            turns.append(RecordedTurn(messages=tuple(messages), text=_cut(said.text)))
            messages = []
        else:
            parts = (_cut(said.text),)
            messages.append(RecordedMessage(role=said.role, parts=parts, tool=_cut(said.tool), failed=said.failed))
    # the earlier ones were answered
    return (*turns[:-1], *(replace(turn, finish=answer.finish) for turn in turns[-1:]))


def shown(row: HeldOutAnswer | EvalRow, answer: SampledAnswer, images: Sequence[str]) -> ShownRow:
    """A row of a held-out file with an answer to it, as the page shows it."""
    return ShownRow(
        id=row.id,
        kind=row.kind,
        image_type=row.image_type,
        question=row.question,
        truth=row.truth,
        answer=answer,
        images=tuple(images),
        index=row.index,
    )


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} ... ({len(text):,} characters)"


def thumbnails(images: Iterable[Image]) -> list[bytes]:
    """The first images of a row as small PNG files."""
    return [png_bytes(image, THUMBNAIL_PX) for _, image in zip(range(MAX_PICTURES), images, strict=False)]


def write_pictures(run_dir: Path, split: str, pictures: Mapping[str, Sequence[bytes]]) -> None:
    """Store the pictures (PNG files) of rows of a split, by the ids of the rows."""
    names = {row: [write_image(run_dir, png) for png in of_row] for row, of_row in pictures.items()}
    write_atomically(_pictures_file(run_dir, split), (json.dumps(names) + "\n").encode("ascii"))


def read_pictures(run_dir: Path, split: str) -> dict[str, list[str]]:
    """Names of the stored pictures by row of a split; empty where it has none."""
    path = _pictures_file(run_dir, split)
    try:
        found = json.loads(read_file(path, within=run_dir))
        names = {str(row): [str(name) for name in of_row] for row, of_row in found.items()}
        for name in (name for of_row in names.values() for name in of_row):
            image_path(run_dir, name)  # refuses a name that leads elsewhere
    except FileNotFoundError:
        return {}
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} names no pictures ({error!r}); delete that file") from error
    return names


def _pictures_file(run_dir: Path, split: str) -> Path:
    return run_dir / ANSWERS_FOLDER / f"pictures-{split}.json"
