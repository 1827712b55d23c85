"""Recipes after published runs have their values, key by key, and say so in their headers.

recipes/geo3k.yaml is RLinf's run, recipes/geo3k_qwen2_5_vl_7b.yaml is verl's, and with Megatron too. Their settings are
those of the tests of `fovea import-config`: qwen3-vl-2b-grpo-fsdp-geo3k.yaml of RLinf at commit 8804efd, with the 750
steps of the curves in its documentation; run_qwen2_5_vl-7b_seq_balance.sh of verl at commit 3f38806, with the defaults
of verl's actor for what it does not set; run_qwen2_5_vl-7b-megatron.sh and run_qwen3_vl-8b-megatron.sh of verl at
commit 6e7fdc2. The other recipes have the inputs, reward and stages of mixtrain's vlm-rl-training, and the values of
verl's page on training vision-language models.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from fovea.config.loading import load_config
from fovea.config.recipes import read_recipe
from fovea_gym.settings.base import leaves
from gym_tests.tables import table
from tests.tools.importer.runs_of_others import RLINF_TABLE, VERL_TABLE, VERL_VARIANTS

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE, VERL_RECIPE = RECIPES / "geo3k.yaml", RECIPES / "geo3k_qwen2_5_vl_7b.yaml"
SGLANG, VLLM = RECIPES / "geo3k_sglang.yaml", RECIPES / "geo3k_vllm.yaml"
MEGATRON_QWEN2_5, MEGATRON_QWEN3 = RECIPES / "megatron_qwen2_5_vl.yaml", RECIPES / "megatron_qwen3_vl.yaml"

PPO: dict[str, tuple[str, object]] = {
    "model.path": ("model_name", "Qwen/Qwen2-VL-7B-Instruct"),
    "max_steps": ("total_steps", 625),  # its 10,000 steps of one answer, returned as 625 episodes
    "rollout.prompts_per_step": ("total_episodes", 16),
    "rollout.samples_per_prompt": ("one answer a step", 1),
    "train.learning_rate": ("learning_rate", 5e-7),
    "curriculum.enabled": ("curriculum_enabled", True),
    "algorithm.name": ("PPO", "ppo"),
    "algorithm.advantage.name": ("GAE", "gae"),
    "algorithm.ppo_epochs": ("ppo_epochs", 4),
    "algorithm.loss.clip_low": ("clip_epsilon", 0.2),
    "algorithm.loss.clip_high": ("clip_epsilon", 0.2),
    "algorithm.advantage.critic.value_coef": ("value_coef", 0.5),
    "algorithm.advantage.critic.trunk": ("a value head", "shared"),
    "algorithm.entropy_coef": ("entropy_coef", 0.01),
    "algorithm.advantage.gamma": ("gamma", 0.99),
    "algorithm.advantage.gae_lambda": ("gae_lambda", 0.95),
    "algorithm.kl": ("no reference model", None),
    "checkpoint.every_steps": ("checkpoint_interval", 63),
    "checkpoint.keep": ("checkpoint_interval", 10),
    "cluster.gpus_per_node": ("gpu_per_node", 4),
    "max_hours": ("timeout 14400 s", 3.5),
}
GEOSPOT = PPO | {
    "environment.name": ("env_name", "geospot"),
    "environment.weights.country": ("reward", 0.3),
    "environment.weights.region": ("reward", 0.2),
    "environment.weights.city": ("reward", 0.2),
    "environment.weights.coordinates": ("reward", 0.3),
    "environment.tolerances_km": ("tolerance", [500, 200, 100, 50, 25]),
    "curriculum.starts": ("stages", [7, 19, 38, 63]),  # 100, 300, 600 and 1,000 answers
    "environment.columns.lat": ("env_dataset", "lat"),
    "environment.columns.lon": ("env_dataset", "lon"),
    "environment.columns.country": ("env_dataset", "country"),
    "environment.columns.city": ("env_dataset", "city"),
}
VQA = PPO | {
    "environment.name": ("visual QA", "vqa"),
    "environment.prompt_key": ("question", "question"),
    "environment.answer_key": ("answer", "answer"),
    "environment.kind_key": ("type", "type"),
}
POKEMON: dict[str, tuple[str, object]] = {
    "model.path": ("model.path", "Qwen/Qwen2.5-VL-7B-Instruct"),
    "environment.name": ("image captioning", "caption"),
    "environment.train_files": ("data_preprocess/pokemon.py", ["llamafactory/pokemon-gpt4o-captions@train[:90%]"]),
    "environment.test_files": ("a tenth held out", ["llamafactory/pokemon-gpt4o-captions@train[90%:]"]),
    "algorithm.advantage.name": ("algorithm.adv_estimator", "grpo"),
    "rollout.samples_per_prompt": ("rollout.n", 5),
    "algorithm.kl.name": ("actor.use_kl_loss", "loss"),
    "algorithm.kl.coef": ("kl_loss_coef", 0.01),
    "algorithm.kl.estimator": ("low_var_kl", "k3"),
    "algorithm.loss.clip_low": ("actor.clip_ratio", 0.2),
    "algorithm.loss.clip_high": ("actor.clip_ratio", 0.2),
    "algorithm.loss.dual_clip": ("clip_ratio_c", 3.0),
    "algorithm.entropy_coef": ("entropy_coeff", 0.0),
    "algorithm.aggregation": ("actor.loss_agg_mode", "token-mean"),
    "train.learning_rate": ("actor.optim.lr", 1e-6),
    "train.betas": ("betas", [0.9, 0.999]),
    "train.weight_decay": ("weight_decay", 0.01),
    "train.lr_warmup_steps": ("no warm-up", 0),
    "train.gradient_checkpointing": ("model.enable_gradient_checkpointing", "full"),
    "train.enable_dynamic_batch_size": ("actor.use_dynamic_bsz", True),
    "train.max_tokens_per_microbatch": ("ppo_max_token_len_per_gpu", 6144),
    "model.freeze_vision_tower": ("actor.freeze_vision_tower", True),
    "checkpoint.every_steps": ("trainer.save_freq", 20),
    "evaluate.every_steps": ("test_freq", 5),
    "max_epochs": ("total_epochs", 15),
}
"""By our setting: its name elsewhere, which the header has, and its value."""

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
NAMED: dict[Path, dict[str, tuple[str, object]]] = {
    RECIPES / "vlm_gym_geospot.yaml": GEOSPOT,
    RECIPES / "vlm_gym_vqa.yaml": VQA,
    RECIPES / "pokemon.yaml": POKEMON,
}
TABLES = [
    ((RECIPE,), RLINF),
    ((VERL_RECIPE,), VERL),
    ((RECIPE, SGLANG), RLINF | RLINF_SGLANG),
    ((VERL_RECIPE, VLLM), VERL | VERL_VLLM),
    *(((VERL_RECIPE, file), VERL | MEGATRON[file]) for file in MEGATRON),
    *(((file,), {key: value for key, (_, value) in named.items()}) for file, named in NAMED.items()),
]


@table(("recipes", "wanted"), TABLES)
def test_the_recipe_has_their_values(recipes: tuple[Path, ...], wanted: dict[str, object]) -> None:
    found = leaves(load_config(recipes, []).model_dump(mode="json"))
    assert {key: found[key] for key in wanted} == wanted


ADDED = {SGLANG: RECIPE, VLLM: VERL_RECIPE, MEGATRON_QWEN2_5: VERL_RECIPE, MEGATRON_QWEN3: VERL_RECIPE}


@pytest.mark.parametrize("file", ADDED, ids=lambda file: file.stem)
def test_a_recipe_to_add_sets_only_what_differs(file: Path) -> None:
    """Besides the model, which makes it a recipe by itself."""
    alone, before = leaves(read_recipe(file)), leaves(load_config([ADDED[file]], []).model_dump(mode="json"))
    assert {key for key, value in alone.items() if before.get(key) == value} <= {"model.path"}


HEADERS = {
    RECIPE: "importance_sampling_fix, loss_agg_func, clip_ratio_low, adam_beta2, component_placement, save_interval "
    "100, lr_warmup_fraction .01, rollout_backend sglang",
    VERL_RECIPE: "ppo_mini_batch_size, use_dynamic_bsz, kl_loss_coef, n_gpus_per_node, _lora.sh",
    MEGATRON_QWEN2_5: "tensor_model_parallel_size, ppo_max_token_len_per_gpu, param_offload",
    MEGATRON_QWEN3: "tensor_model_parallel_size, context_parallel_size, recompute_granularity, moe_",
    **{file: ", ".join(theirs for theirs, _ in named.values() if "_" in theirs) for file, named in NAMED.items()},
}


@table(("recipe", "names"), HEADERS.items())
def test_the_header_names_what_it_takes_over(recipe: Path, names: str) -> None:
    header = recipe.read_text(encoding="utf-8").partition("\nseed:")[0].replace("\n# ", " ")
    assert [name for name in names.split(", ") if name not in header] == []


def test_the_variants_in_the_header_are_settings() -> None:
    header = VERL_RECIPE.read_text(encoding="utf-8").partition("# Variants")[2].partition("# A frozen tower")[0]
    variants = [line.partition(" -> ")[2] for line in header.splitlines()[1:] if " -> " in line]
    assert len(variants) == 3
    changed = [leaves(load_config([VERL_RECIPE], shlex.split(each)).model_dump(mode="json")) for each in variants]
    for (_, expected), settings in zip((VERL_VARIANTS["frozen tower"], VERL_VARIANTS["LoRA"]), changed, strict=False):
        # the tower has no adapters here anyway
        stated = {key: value for key, value in expected.items() if key != "model.lora.exclude"}
        assert {key: settings[key] for key in stated} == stated
