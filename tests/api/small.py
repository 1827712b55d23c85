"""The smallest runs from Python: settings, rows and a reward."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

import fovea
from gym_tests.images import png

SETTINGS: Mapping[str, object] = {
    "model.tiny": {"hidden_size": 32, "num_layers": 1, "vocabulary_size": 300},
    "max_steps": 2,
    "warmup": None,
    "log": {"progress": False, "tensorboard": False},
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4},
    "evaluate": {"test_size": 2, "dev_size": 2, "image_controls": False, "shared_images": "ignore"},
    "parity": {"prompts": 1},
    "data.cache_dir": "cache",
}
SHAPES = {"environment": {"name": "shapes", "train_size": 8, "dev_size": 2, "test_size": 2}}
COLOURS = ("red", "green", "blue", "white", "yellow", "purple", "orange", "pink", "brown", "cyan")


def picture(colour: str) -> Image.Image:
    return Image.new("RGB", (32, 32), colour)


def base64_png(colour: str) -> str:
    return base64.b64encode(png(colour, 32)).decode()


def rows(size: int = 8) -> list[dict[str, Any]]:
    """Pictures of one colour each, under a separate column name."""
    colours = [COLOURS[index % len(COLOURS)] for index in range(size)]
    return [
        {"photo": picture(colour), "question": f"{index}: which colour?", "answer": colour}
        for index, colour in enumerate(colours)
    ]


PHOTOS = {"image_key": "photo"}


def score(task: fovea.Task, text: str, images: Sequence[Image.Image]) -> dict[str, float]:
    """Many letters, and whether the picture is the one of the row."""
    shown = images[0].getpixel((0, 0)) == Image.new("RGB", (1, 1), task.answer).getpixel((0, 0))
    return {"reward": len(text) / 10, "accuracy": float(task.answer in text), "shown": float(shown)}


def of_rows(given: Any = None, **settings: object) -> fovea.GRPO:
    """A trainer on these rows, by default those above, in the folder `run`."""
    given = rows() if given is None else given
    return fovea.GRPO(rows=given, reward=score, environment=PHOTOS, settings={**SETTINGS, "run_dir": "run", **settings})


def of_shapes(**settings: object) -> dict[str, Any]:
    """The settings of a run on few scenes in the folder `run`."""
    return {**SETTINGS, **SHAPES, "run_dir": "run", **settings}
