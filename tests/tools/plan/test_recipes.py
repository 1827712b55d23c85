"""Every recipe fits the machine that its head names, by its plan; some take two steps on two ranks with tiny models."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fovea.config.loading import load_config
from fovea.config.recipes import shipped_recipes
from fovea.config.run import Config
from fovea.models.processor import load_processor
from fovea.models.render import Renderer
from fovea.wiring.environment import make_environment
from fovea.wiring.images import make_opener
from fovea.wiring.model import locate_model
from fovea_tools.plan.machine import GIB, machine_of
from fovea_tools.plan.plan import RunPlan, make_plan
from tests.tools.plan.published import (
    QWEN2_5_VL_3B,
    QWEN2_5_VL_7B,
    QWEN2_VL_7B,
    QWEN3_5_4B,
    QWEN3_5_9B,
    QWEN3_VL_2B,
    QWEN3_VL_4B,
    QWEN3_VL_8B,
    RECIPES,
    SMOLVL,
    folder_of,
)

GB = 10**9
VERL = "geo3k_qwen2_5_vl_7b"
FROZEN, LORA = "model.freeze_vision_tower=true", "model.lora={rank: 64, alpha: 32, targets: all-linear}"
MACHINE = re.compile(r"^# Machine: (?P<count>\d+) (?P<kind>x|CPU core,) (?P<memory>\d+) GB$", re.MULTILINE)
TINY = ["model.path=null", "model.tiny={}"]
"""In place of the demo's model, which it has made."""
BEFORE = {
    "geo3k_sglang": "geo3k",
    **dict.fromkeys(("geo3k_vllm", "megatron_qwen2_5_vl", "megatron_qwen3_vl"), VERL),
    "tiny": "vqa",
    **{f"easyr1_{name}": "easyr1_geo3k" for name in ("dapo", "gspo", "cispo", "sapo")},
    **dict.fromkeys(("thinklite", "noisy_rollout"), "easyr1_geo3k"),
    "vppo": "papo",
}
"""A recipe that another one is added to."""
UNKNOWN_SIZES = {"easyr1_3b", "r1v_clevr", "visual_rft_lisa"}
"""Recipes of models whose config.json tests/tools/plan/published.py lacks."""
MODELS = {
    "Qwen/Qwen2-VL-7B-Instruct": QWEN2_VL_7B,
    "Qwen/Qwen2.5-VL-3B-Instruct": QWEN2_5_VL_3B,
    "Qwen/Qwen2.5-VL-7B-Instruct": QWEN2_5_VL_7B,
    "Qwen/Qwen3-VL-2B-Instruct": QWEN3_VL_2B,
    "Qwen/Qwen3-VL-8B-Instruct": QWEN3_VL_8B,
    "Qwen/Qwen3.5-4B": QWEN3_5_4B,
    "models/smolvl": SMOLVL,
}


def planned(name: str, folder: Path) -> tuple[Config, RunPlan]:
    """The settings of a recipe, and their plan on the machine that its head names."""
    files = [shipped_recipes()[each] for each in (BEFORE.get(name), name) if each is not None]
    config = load_config(files, [f"run_dir={folder}/run"])
    if config.model.path == "./exported/demo":
        config = load_config(files, TINY)
    elif config.model.path is not None:
        config = load_config(files, [f"model.path={folder_of(folder, MODELS[config.model.path])}"])
    (named,) = MACHINE.finditer(files[-1].read_text(encoding="utf-8"))
    count, memory_gb = int(named["count"]), int(named["memory"])
    found = machine_of(config.plan, config.cluster, config.model.device)
    if named["kind"] == "x":
        assert (found.gpus, found.gpu.memory_gib, found.gpu.is_cuda) == (count, memory_gb, True)
        return config, make_plan(config)
    assert (found.gpus, found.gpu.is_cuda) == (count, False)
    own = replace(found, gpu=replace(found.gpu, memory_gib=memory_gb * GB / GIB))
    return config, make_plan(config, machine=own)


@pytest.mark.parametrize("name", sorted({*shipped_recipes()} - UNKNOWN_SIZES))
def test_every_recipe_fits_the_machine_that_its_head_names(name: str, tmp_path: Path) -> None:
    config, plan = planned(name, tmp_path)
    assert plan.fits
    seconds = [phase.seconds for phase in plan.compute if phase.seconds is not None]
    if config.max_hours is not None:
        assert sum(seconds) * config.max_steps < config.max_hours * 3600 - 600, "dev readings take time as well"
    if name.startswith("vlm_gym_"):  # PPO of all weights of a 7B model, without adapters or offload
        assert plan.trainable == plan.parameters == 8_291_375_616
        assert not config.train.backend.cpu_offload


@pytest.mark.parametrize(
    ("recipes", "sizes", "overrides"),
    [
        (["geo3k"], QWEN3_VL_2B, []),
        (["geo3k"], QWEN3_VL_4B, []),
        (["geo3k"], QWEN3_VL_8B, []),
        (["geo3k_qwen3_5"], QWEN3_5_9B, []),
        ([VERL], QWEN2_5_VL_7B, []),
        ([VERL], QWEN2_5_VL_7B, [FROZEN]),
        ([VERL], QWEN2_5_VL_7B, [LORA]),
        ([VERL], QWEN3_VL_8B, ["rollout.engine.max_batch_tokens=262144"]),
        ([VERL], QWEN2_5_VL_7B, ["plan.gpu=a100-40", "rollout.engine.max_batch_tokens=65536"]),
        ([VERL, "megatron_qwen2_5_vl"], QWEN2_5_VL_7B, []),
        ([VERL, "megatron_qwen3_vl"], QWEN3_VL_8B, []),
    ],
    ids=[
        *("2B", "4B", "8B", "Qwen3.5-9B", "7B", "7B frozen tower", "7B LoRA", "8B of verl's", "7B on 40 GB"),
        *("7B under Megatron", "8B under Megatron"),
    ],
)
def test_it_fits_8_gpus(recipes: list[str], sizes: dict[str, Any], overrides: list[str], tmp_path: Path) -> None:
    path = f"model.path={folder_of(tmp_path / 'model', sizes)}"
    files = [RECIPES / f"{recipe}.yaml" for recipe in recipes]
    plan = make_plan(load_config(files, [path, "plan.gpus=8", "plan.gpu=h100", *overrides]))
    assert plan.fits
    # of the update's peak nothing is so small that the recipe could not be meant for these GPUs
    assert plan.peak.total > (0.2 if len(recipes) == 1 else 0.8) * plan.machine.usable_bytes


@pytest.mark.parametrize(
    ("recipe", "tokens"),
    [
        *(("shapes", 25), ("shapes_ppo", 25), ("shapes_zoom", 85), ("shapes_small", 47)),
        *(("frozen_lake", 37), ("frozen_lake_ppo", 37), ("sokoban", 50), ("pages", 41), ("boxes", 25)),
    ],
)
def test_a_plan_assumes_the_prompts_that_the_demo_has(recipe: str, tokens: int, tmp_path: Path) -> None:
    made = TINY if recipe == "shapes_small" else []
    config = load_config([RECIPES / f"{recipe}.yaml"], [f"run_dir={tmp_path}/run", *made])
    environment = make_environment(config).environment
    located = locate_model(config, tmp_path, lambda: environment)
    renderer = Renderer(load_processor(located), make_opener(config.data, tmp_path))
    tasks = environment.tasks("train")
    longest = max(renderer.prompt(environment.prompt(tasks[index])).num_tokens for index in range(40))
    assert config.plan.prompt_tokens == longest == tokens
