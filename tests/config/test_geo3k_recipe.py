"""recipes/geo3k.yaml is RLinf's run, recipes/geo3k_qwen2_5_vl_7b.yaml is verl's, and with Megatron too; key by key.

Their settings are those of the tests of `fovea import-config`: qwen3-vl-2b-grpo-fsdp-geo3k.yaml of RLinf at commit
8804efd, with the 750 steps of the curves in its documentation; run_qwen2_5_vl-7b_seq_balance.sh of verl at commit
3f38806, with the defaults of verl's actor for what it does not set; run_qwen2_5_vl-7b-megatron.sh and
run_qwen3_vl-8b-megatron.sh of verl at commit 6e7fdc2.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from fovea.config.base import leaves
from fovea.config.loading import load_config
from fovea.config.recipes import read_recipe
from tests.tables import table
from tests.tools.importer.runs_of_others import RLINF_TABLE, VERL_TABLE, VERL_VARIANTS

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE, VERL_RECIPE = RECIPES / "geo3k.yaml", RECIPES / "geo3k_qwen2_5_vl_7b.yaml"
SGLANG, VLLM = RECIPES / "geo3k_sglang.yaml", RECIPES / "geo3k_vllm.yaml"
MEGATRON_QWEN2_5, MEGATRON_QWEN3 = RECIPES / "megatron_qwen2_5_vl.yaml", RECIPES / "megatron_qwen3_vl.yaml"

TAKEN_OVER = ("algorithm.", "checkpoint.", "data.", "environment.format_weight", "model.dtype", "rollout.", "train.")


def of_run(imported: dict[str, Any], **differs: object) -> dict[str, Any]:
    """Values of a run, as the tests of `fovea import-config` have them, with `section__key`s that a recipe changes."""
    kept = {
        key: value
        for key, value in imported.items()
        if key.startswith(TAKEN_OVER) and not key.startswith(("rollout.engine.", "train.backend."))
    }
    return {**kept, **{key.replace("__", "."): value for key, value in differs.items()}}


def engine_of(imported: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: imported[key] for key in (f"rollout.engine.{each}" for each in ("name", *keys))}


RLINF = of_run(
    RLINF_TABLE,
    # lr_warmup_fraction is in actor.lr_sched, which their FSDP trainer does not read
    train__lr_warmup_steps=0,
    train__max_tokens_per_microbatch=16_384,
    max_steps=750,
    environment__format_weight=0,
)
RLINF_SGLANG = {
    **engine_of(RLINF_TABLE, "tensor_parallel_size", "gpu_memory_utilization", "max_num_seqs"),
    "rollout.engine.engine_args.attention_backend": "triton",
}
"""Where the recipe with SGLang, which is added after RLinf's, differs from it."""

ROWS, EPOCHS = 2101, 15

VERL = of_run(
    VERL_TABLE,
    model__path=VERL_TABLE["model.path"],
    model__freeze_vision_tower=False,
    environment__think_tags=True,
    # the script with balanced micro-batches
    train__enable_dynamic_batch_size=True,
    train__groups_per_microbatch=1,
    train__max_tokens_per_microbatch=6144,
    evaluate__every_steps=5,
    # trainer.total_epochs, each without its last batch
    max_steps=EPOCHS * (ROWS // VERL_TABLE["rollout.prompts_per_step"]),
    plan__gpus=8,
)
VERL_VLLM = engine_of(VERL_TABLE, "gpu_memory_utilization", "enable_chunked_prefill", "enforce_eager")
"""Where the recipe with vLLM, which is added after verl's, differs from it."""
MEGATRON: dict[Path, dict[str, Any]] = {
    MEGATRON_QWEN2_5: {
        "model.path": "Qwen/Qwen2.5-VL-7B-Instruct",
        "train.backend.name": "megatron",
        "train.backend.tensor_parallel_size": 2,
        "train.backend.pipeline_parallel_size": 1,
        "train.backend.sequence_parallel": True,
        # the same number of sequences of 1,024 + 2,048 tokens, each counted with its prompt there
        "train.max_tokens_per_microbatch": 4096,
        "train.gradient_checkpointing": "none",
    },
    MEGATRON_QWEN3: {
        "model.path": "Qwen/Qwen3-VL-8B-Instruct",
        "train.backend.name": "megatron",
        "train.backend.tensor_parallel_size": 2,
        "train.backend.pipeline_parallel_size": 2,
        "train.backend.sequence_parallel": True,
        "train.max_tokens_per_microbatch": 4096,
        "train.gradient_checkpointing": "full",
    },
}
"""Where a recipe with Megatron, which is added after verl's, differs from it; all else is of VERL."""
TABLES = [
    ((RECIPE,), RLINF),
    ((VERL_RECIPE,), VERL),
    ((RECIPE, SGLANG), RLINF | RLINF_SGLANG),
    ((VERL_RECIPE, VLLM), VERL | VERL_VLLM),
    *(((VERL_RECIPE, file), VERL | MEGATRON[file]) for file in MEGATRON),
]


@table(("recipes", "key", "value"), [(recipes, *entry) for recipes, table in TABLES for entry in table.items()])
def test_the_recipe_has_their_value(recipes: tuple[Path, ...], key: str, value: object) -> None:
    assert leaves(load_config(recipes, []).model_dump(mode="json"))[key] == value


def test_a_header_names_what_a_table_takes_from_their_files() -> None:
    header = RECIPE.read_text(encoding="utf-8").partition("\nseed:")[0]
    for value in ("save_interval 100", "lr_warmup_fraction .01", "rollout_backend sglang"):
        assert value in header


ADDED = {SGLANG: RECIPE, VLLM: VERL_RECIPE, MEGATRON_QWEN2_5: VERL_RECIPE, MEGATRON_QWEN3: VERL_RECIPE}


@pytest.mark.parametrize("file", ADDED, ids=lambda file: file.stem)
def test_a_recipe_to_add_sets_only_what_differs(file: Path) -> None:
    """Besides the model, which makes it a recipe by itself."""
    alone, before = leaves(read_recipe(file)), leaves(load_config([ADDED[file]], []).model_dump(mode="json"))
    assert {key for key, value in alone.items() if before.get(key) == value} <= {"model.path"}


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        (RECIPE, ("importance_sampling_fix", "loss_agg_func", "clip_ratio_low", "adam_beta2", "component_placement")),
        (VERL_RECIPE, ("ppo_mini_batch_size", "use_dynamic_bsz", "kl_loss_coef", "n_gpus_per_node", "_lora.sh")),
        (MEGATRON_QWEN2_5, ("tensor_model_parallel_size", "ppo_max_token_len_per_gpu", "param_offload")),
        (MEGATRON_QWEN3, ("tensor_model_parallel_size", "context_parallel_size", "recompute_granularity", "moe_")),
    ],
)
def test_the_header_names_what_it_takes_over(recipe: Path, keys: tuple[str, ...]) -> None:
    header = [line for line in recipe.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    for key in keys:
        assert key in "\n".join(header)


def test_the_variants_in_the_header_are_settings() -> None:
    header = VERL_RECIPE.read_text(encoding="utf-8").partition("# Variants")[2].partition("# A frozen tower")[0]
    variants = [line.partition(" -> ")[2] for line in header.splitlines()[1:] if " -> " in line]
    assert len(variants) == 3
    changed = [leaves(load_config([VERL_RECIPE], shlex.split(each)).model_dump(mode="json")) for each in variants]
    for (_, expected), settings in zip((VERL_VARIANTS["frozen tower"], VERL_VARIANTS["LoRA"]), changed, strict=False):
        # the tower has no adapters here anyway
        stated = {key: value for key, value in expected.items() if key != "model.lora.exclude"}
        assert {key: settings[key] for key in stated} == stated
