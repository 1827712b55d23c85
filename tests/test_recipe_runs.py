"""Every recipe after a published run takes two steps with a tiny model, on rows in the layout that its users have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fovea.config.loading import load_config
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.wiring.run import build
from gym_tests.environments.files import COLOURS, row, square
from tests.runs import HASH_REWARD

ROOT = Path(__file__).parents[1]
SMALL = [
    *("model.path=null", "model.tiny={hidden_size: 32, num_layers: 1}", "model.dtype=float32"),
    *("max_steps=2", "log.progress=false", "log.tensorboard=false", "train.gradient_checkpointing=none"),
    *("rollout.prompts_per_step=4", "rollout.max_new_tokens=6", "data.max_prompt_tokens=512"),
    *("evaluate.before_training=false", "evaluate.test_size=2", "evaluate.dev_size=2", "parity.prompts=1"),
    *("evaluate.image_controls=false", "evaluate.shared_images=ignore", "algorithm.minibatches=2"),
    # untrained answers are never right; a reward that varies gives the update something to do
    HASH_REWARD,
]
GROUPS = ["rollout.samples_per_prompt=2"]
PLACES = [("France", "Paris", 48.86, 2.35), ("Japan", "Tokyo", 35.68, 139.65)]


def geometry() -> list[dict[str, Any]]:
    return [row(f"How many sides have {n} squares?", str(4 * n)) for n in range(1, 13)]


def verl_geometry() -> list[dict[str, Any]]:
    prompts = [[{"role": "user", "content": f"<image>How many sides have {n} squares?"}] for n in range(1, 13)]
    truths = [{"style": "rule", "ground_truth": str(4 * n)} for n in range(1, 13)]
    return [
        {"data_source": "hiyouga/geometry3k", "prompt": prompt, "images": [square("red")], "reward_model": truth}
        for prompt, truth in zip(prompts, truths, strict=True)
    ]


def pokemon() -> list[dict[str, Any]]:
    """As verl's own script writes them, and the hub has them under `conversations`."""
    said = [("user", "<image>Describe it."), ("assistant", "A red square with a friendly face.")]
    messages = [{"role": role, "content": text} for role, text in said]
    return [{"messages": messages, "images": [square(colour, 32 + n)]} for n in range(4) for colour in COLOURS]


def photos() -> list[dict[str, Any]]:
    return [
        {"image": square("green", 32 + n), "country": country, "city": city, "lat": lat, "lon": lon}
        for n in range(6)
        for country, city, lat, lon in PLACES
    ]


def visual_qa() -> list[dict[str, Any]]:
    questions = [("How many people?", "3", "counting"), ("What color is it?", "red", "attribute")]
    questions.append(("Is there a dog?", "yes", "existence"))
    return [
        {"image": square("red", 32 + n), "question": question, "answer": answer, "type": kind}
        for n in range(8)
        for question, answer, kind in questions
    ]


VERL = "geo3k_qwen2_5_vl_7b"
RUNS = {
    "RLinf": ("geo3k", geometry, GROUPS),
    "verl": (VERL, verl_geometry, GROUPS),
    "verl, frozen": (VERL, geometry, [*GROUPS, "model.freeze_vision_tower=true"]),
    "verl, LoRA": (VERL, geometry, [*GROUPS, "model.lora={rank: 64, alpha: 32, targets: all-linear}"]),
    "verl, unbalanced": (
        VERL,
        geometry,
        [*GROUPS, "train.enable_dynamic_batch_size=false", "train.groups_per_microbatch=2"],
    ),
    "Qwen3.5": ("geo3k_qwen3_5", geometry, [*GROUPS, "model.tiny.family=qwen3_5", "model.tiny.num_layers=3"]),
    "pokemon": ("pokemon", pokemon, GROUPS),
    "mixtrain, GeoSpot": ("vlm_gym_geospot", photos, ["reward=null", "curriculum.starts=[1, 2, 3, 4]"]),
    "mixtrain, visual QA": ("vlm_gym_vqa", visual_qa, ["curriculum.starts=[1, 2]"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "rows", "settings"), RUNS.values(), ids=RUNS.keys())
def test_it_takes_two_steps(
    recipe: str, rows: Callable[[], list[dict[str, Any]]], settings: Sequence[str], tmp_path: Path
) -> None:
    file, run_dir = tmp_path / "rows.parquet", tmp_path / "run"
    pq.write_table(pa.Table.from_pylist(rows()), file)
    files = [f"environment.{split}_files=['{file}']" for split in ("train", "dev", "test")]
    own = [f"run_dir={run_dir}", f"data.cache_dir={tmp_path / 'cache'}", *files]
    train(build(load_config([ROOT / "recipes" / f"{recipe}.yaml"], [*SMALL, *own, *settings])))
    steps = read_metrics(run_dir)
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["actions_trained"] > 0 and step["grad_norm"] > 0 for step in steps)
    if "vlm_gym" in recipe:
        assert all("value_loss" in step and step["epochs_run"] >= 1 for step in steps)
        assert [step["curriculum/stage"] for step in steps] == [1, 2]
    if recipe == "vlm_gym_vqa":
        assert "accuracy/train/counting" not in steps[0], "the first stage asks whether things exist"
