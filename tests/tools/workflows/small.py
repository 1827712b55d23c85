"""The smallest rows, model and settings that the workflows train with."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from PIL import Image

from tests.tiny_models import save, tiny

PLACES = [
    ("France", "Paris", 48.86, 2.35),
    ("Japan", "Tokyo", 35.68, 139.65),
    ("Kenya", "Nairobi", -1.29, 36.82),
    ("Peru", "Lima", -12.05, -77.04),
]
QUESTIONS = [
    ("How many people?", "3", "counting"),
    ("What color is the car?", "red", "attribute"),
    ("Is there a dog?", "yes", "existence"),
]
SETTINGS: dict[str, Any] = {
    **{"model.dtype": "float32", "train.gradient_checkpointing": "none", "parity.prompts": 0},
    **{"rollout.prompts_per_step": 2, "rollout.max_new_tokens": 4},
    **{"evaluate.every_steps": 0, "evaluate.image_controls": False, "evaluate.shared_images": "ignore"},
    **{"log.tensorboard": False, "log.progress": False},
}


def model(folder: Path) -> Path:
    """A tiny Qwen2-VL as `from_pretrained` reads it."""
    return save(tiny("qwen2_vl", hidden_size=32, num_layers=1, vocabulary_size=300), folder)


def geospot_rows(folder: Path, size: int = 20) -> Path:
    """The columns of the published page, as a CSV file beside its pictures."""
    rows = [(picture(folder, index), *PLACES[index % len(PLACES)]) for index in range(size)]
    with (folder / "places.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image_url", "country", "city", "lat", "lon"), *rows])
    return folder / "places.csv"


def vqa_rows(folder: Path, size: int = 24) -> Path:
    """The keys of the published page, as JSON Lines."""
    rows = []
    for index in range(size):
        question, answer, kind = QUESTIONS[index % len(QUESTIONS)]
        rows.append({"image": picture(folder, index), "question": question, "answer": answer, "type": kind})
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "questions.jsonl"


def picture(folder: Path, index: int) -> str:
    """The name of a new picture in the folder."""
    name = f"{index}.png"
    Image.new("RGB", (32, 32), (10 * index, 255 - 10 * index, 128)).save(folder / name)
    return name
