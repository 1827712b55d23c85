"""Sample records: prompts, images and sampled answers of some steps, stored in the run folder for the report.

samples/step-000050.jsonl holds one record per line; samples/images/<hash>.png holds each image once.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from fovea.data.images import OpenImage
from fovea.errors import DataError
from fovea.evaluation.answer import SampledAnswer, sampled_answer
from fovea.types import Group
from fovea.utils.files import from_json_number, json_number, write_atomically

MAX_PROMPTS, MAX_ANSWERS = 4, 4
MAX_SIDE_PX = 768
"""Larger images are stored at this size, enough for display."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """One task with some of its sampled answers."""

    prompt: str
    truth: str
    kind: str
    images: tuple[bytes | None, ...] = ()
    """PNG files (see `png_bytes`); None where an image file has been deleted from the run folder."""
    answers: tuple[SampledAnswer, ...]


def sample_records(groups: Sequence[Group], open_image: OpenImage) -> list[SampleRecord]:
    """The first MAX_PROMPTS groups of a step, each with its first MAX_ANSWERS answers."""
    return [_sample_record(group, open_image) for group in groups[:MAX_PROMPTS]]


def _sample_record(group: Group, open_image: OpenImage) -> SampleRecord:
    task = group.episodes[0].task
    return SampleRecord(
        prompt=task.question,
        truth=task.answer,
        kind=task.kind,
        images=tuple(png_bytes(open_image(ref)) for ref in task.images),
        answers=tuple(map(sampled_answer, group.episodes[:MAX_ANSWERS])),
    )


def png_bytes(image: Image.Image) -> bytes:
    """The image as the bytes of a PNG file, downscaled to MAX_SIDE_PX if it is larger."""
    small = image.convert("RGB")
    small.thumbnail((MAX_SIDE_PX, MAX_SIDE_PX))
    buffer = io.BytesIO()
    small.save(buffer, format="PNG")
    return buffer.getvalue()


def write_samples(run_dir: Path, step: int, records: Sequence[SampleRecord]) -> None:
    """Write the records of one step; records of an earlier attempt at it (before a resume) are replaced."""
    lines = []
    for record in records:
        names = [_write_image(run_dir, image) for image in record.images if image is not None]
        lines.append(json.dumps(_to_json(record, names), allow_nan=False) + "\n")
    write_atomically(_folder(run_dir) / f"step-{step:06d}.jsonl", "".join(lines).encode())


def sample_steps(run_dir: Path) -> list[int]:
    """Steps with sample records, in ascending order."""
    return sorted(int(path.stem.removeprefix("step-")) for path in _folder(run_dir).glob("step-*.jsonl"))


def read_samples(run_dir: Path, steps: Collection[int] | None = None) -> dict[int, tuple[SampleRecord, ...]]:
    """Sample records by step, in ascending order; of all steps unless `steps` is given."""
    chosen = sample_steps(run_dir) if steps is None else sorted(steps)
    return {step: _read_step(run_dir, step) for step in chosen}


def _folder(run_dir: Path) -> Path:
    return run_dir / "samples"


def _image_path(run_dir: Path, name: str) -> Path:
    return _folder(run_dir) / "images" / f"{name}.png"


def _write_image(run_dir: Path, png: bytes) -> str:
    name = hashlib.sha256(png).hexdigest()[:16]
    path = _image_path(run_dir, name)
    if not path.exists():
        write_atomically(path, png)
    return name


def _to_json(record: SampleRecord, image_names: Sequence[str]) -> dict[str, object]:
    answers = [
        {
            "text": answer.text,
            "reward": json_number(answer.reward),
            "accuracy": json_number(answer.accuracy),
            "parts": _parts_to_json(answer.parts),
            "image_parts": list(map(_parts_to_json, answer.image_parts)),
            "finish": answer.finish,
        }
        for answer in record.answers
    ]
    return {
        "kind": record.kind,
        "prompt": record.prompt,
        "truth": record.truth,
        "images": list(image_names),
        "answers": answers,
    }


def _parts_to_json(parts: Mapping[str, float]) -> dict[str, float | None]:
    return {name: json_number(value) for name, value in parts.items()}


def _parts_from_json(parts: Mapping[str, float | None]) -> dict[str, float]:
    return {name: from_json_number(value) for name, value in parts.items()}


def _read_step(run_dir: Path, step: int) -> tuple[SampleRecord, ...]:
    path = _folder(run_dir) / f"step-{step:06d}.jsonl"
    try:
        # split at "\n" only: str.splitlines would also cut inside a text with a line separator
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        return tuple(_from_json(run_dir, row) for row in rows)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} holds no sample records ({error!r}); delete that file") from error


def _from_json(run_dir: Path, row: Mapping[str, Any]) -> SampleRecord:
    return SampleRecord(
        kind=str(row["kind"]),
        prompt=str(row["prompt"]),
        truth=str(row["truth"]),
        images=tuple(_read_image(run_dir, name) for name in row["images"]),
        answers=tuple(_answer_from_json(answer) for answer in row["answers"]),
    )


def _answer_from_json(row: Mapping[str, Any]) -> SampledAnswer:
    return SampledAnswer(
        text=str(row["text"]),
        reward=from_json_number(row["reward"]),
        accuracy=from_json_number(row["accuracy"]),
        parts=_parts_from_json(row["parts"]),
        image_parts=tuple(map(_parts_from_json, row.get("image_parts", ()))),  # records of older runs lack image_parts
        finish="stop" if row["finish"] == "stop" else "length",
    )


def _read_image(run_dir: Path, name: str) -> bytes | None:
    # a run folder may come from someone else: a name must not lead out of it
    if not re.fullmatch(r"[0-9a-f]{16}", name):
        raise ValueError(f"image name {name!r}")
    try:
        return _image_path(run_dir, name).read_bytes()
    except FileNotFoundError:
        return None
