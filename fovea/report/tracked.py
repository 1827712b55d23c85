"""Samples for experiment trackers: an image of each recorded group with its question and an answer under it."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from PIL import Image

from fovea.metrics.tracker import TrackedSample
from fovea.report.images import read_image
from fovea.report.records import SampleRecord

MAX_TEXT_CHARS = 1000
"""Of a question and of an answer in a caption."""


def tracked_samples(
    run_dir: Path, records: Iterable[SampleRecord], *, max_images: int, max_pixels: int
) -> Sequence[TrackedSample]:
    """The first image of the first `max_images` records that have one, of at most `max_pixels` pixels each."""
    with_images = ((record, read_image(run_dir, record.images[0].name)) for record in records if record.images)
    return [
        TrackedSample(image=_decoded(png, max_pixels), caption=_caption(record))
        for record, png in islice(with_images, max_images)
        if png is not None
    ]


def _decoded(png: bytes, max_pixels: int) -> Image.Image:
    image = Image.open(io.BytesIO(png)).convert("RGB")
    scale = min(1.0, (max_pixels / (image.width * image.height)) ** 0.5)
    if scale == 1.0:
        return image
    return image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))


def _caption(record: SampleRecord) -> str:
    """The question, the truth, and the group's first answer: the best or worst would show another policy."""
    rewards = [answer.score.reward for answer in record.answers]
    lines = [_cut(record.prompt), f"truth: {_cut(record.truth)}"]
    if len(record.images) > 1:
        lines.append(f"image 1 of {len(record.images)}")
    if rewards:
        mean = sum(rewards) / len(rewards)
        lines.append(
            f"reward {rewards[0]:.3g} (mean of {len(rewards)}: {mean:.3g}): {_cut(record.answers[0].score.text)}"
        )
    return "\n".join(lines)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}..."
