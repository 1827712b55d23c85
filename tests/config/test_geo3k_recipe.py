"""recipes/geo3k.yaml is RLinf's run, recipes/geo3k_qwen2_5_vl_7b.yaml is verl's, and with Megatron too; key by key.

The right sides of the tables are theirs, under their own names: qwen3-vl-2b-grpo-fsdp-geo3k.yaml of RLinf at commit
8804efd, with the 750 steps of the curves in its documentation; run_qwen2_5_vl-7b_seq_balance.sh of verl at commit
3f38806, with the defaults of verl's actor for what it does not set; run_qwen2_5_vl-7b-megatron.sh and
run_qwen3_vl-8b-megatron.sh of verl at commit 6e7fdc2.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from fovea.config.base import leaves
from fovea.config.loading import load_config
from fovea.config.recipes import read_recipe, read_yaml
from tests.tables import table
from tests.tools.importer.runs_of_others import RLINF as RLINF_FILE
from tests.tools.importer.runs_of_others import VERL as VERL_FILE
from tests.tools.importer.runs_of_others import VERL_VARIANTS

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE, VERL_RECIPE = RECIPES / "geo3k.yaml", RECIPES / "geo3k_qwen2_5_vl_7b.yaml"
SGLANG, VLLM = RECIPES / "geo3k_sglang.yaml", RECIPES / "geo3k_vllm.yaml"
MEGATRON_QWEN2_5, MEGATRON_QWEN3 = RECIPES / "megatron_qwen2_5_vl.yaml", RECIPES / "megatron_qwen3_vl.yaml"
STEPS, SEQ_LENGTH, MAX_PROMPT_LENGTH = 750, 8192, 4096

RLINF: dict[str, tuple[str, object]] = {
    "rollout.prompts_per_step": ("data.rollout_batch_size", 64),
    "rollout.samples_per_prompt": ("algorithm.group_size", 8),
    "data.max_prompt_tokens": ("data.max_prompt_length", MAX_PROMPT_LENGTH),
    "rollout.max_new_tokens": ("seq_length - max_prompt_length", SEQ_LENGTH - MAX_PROMPT_LENGTH),
    "rollout.temperature": ("sampling_params.temperature", 1),
    "rollout.top_p": ("sampling_params.top_p", 1.0),
    "rollout.top_k": ("sampling_params.top_k, above any vocabulary", 0),
    "algorithm.importance_sampling_fix": ("algorithm.importance_sampling_fix", True),
    "algorithm.importance_sampling_clip": ("algorithm.importance_sampling_clip", 2),
    "algorithm.importance_sampling_level": ("per token", "token"),
    "algorithm.advantage.name": ("algorithm.adv_type", "grpo"),
    "algorithm.aggregation": ("algorithm.loss_agg_func", "seq-mean-token-mean"),
    "algorithm.kl": ("algorithm.kl_beta 0", None),
    "algorithm.entropy_coef": ("algorithm.entropy_bonus", 0.0),
    "algorithm.loss.name": ("algorithm.loss_type actor", "clip"),
    "algorithm.loss.clip_low": ("algorithm.clip_ratio_low", 0.2),
    "algorithm.loss.clip_high": ("algorithm.clip_ratio_high", 0.28),
    "algorithm.loss.dual_clip": ("algorithm.clip_ratio_c", None),
    "algorithm.minibatches": ("algorithm.n_minibatches", 1),
    "algorithm.ppo_epochs": ("one pass", 1),
    "train.learning_rate": ("actor.optim.lr", 1e-6),
    "train.betas": ("actor.optim.adam_beta1, adam_beta2", [0.9, 0.98]),
    "train.adam_eps": ("actor.optim.adam_eps", 1e-8),
    "train.weight_decay": ("actor.optim.weight_decay", 0.1),
    "train.max_grad_norm": ("actor.optim.clip_grad", 1),
    "train.lr_schedule": ("actor.lr_sched.lr_decay_style", "constant"),
    "train.lr_warmup_steps": ("lr_warmup_fraction is in actor.lr_sched, which their FSDP trainer does not read", 0),
    "max_steps": ("the curves of its documentation", STEPS),
    "checkpoint.every_steps": ("runner.save_interval", 100),
    "environment.format_weight": ("reward_max_val 1, reward_min_val 0", 0),
    "model.dtype": ("mixed_precision.param_dtype", "bfloat16"),
    "train.gradient_checkpointing": ("fsdp_config.gradient_checkpointing=True", "full"),
    "train.enable_dynamic_batch_size": ("runner.enable_dynamic_batch_size", True),
}


RLINF_SGLANG: dict[str, tuple[str, object]] = {
    "rollout.engine.name": ("rollout.rollout_backend", "sglang"),
    "rollout.engine.tensor_parallel_size": ("rollout.tensor_parallel_size", 1),
    "rollout.engine.gpu_memory_utilization": ("rollout.gpu_memory_utilization", 0.6),
    "rollout.engine.max_num_seqs": ("rollout.max_running_requests", 64),
    "rollout.engine.engine_args.attention_backend": ("rollout.sglang.attention_backend", "triton"),
}
"""Where the recipe with SGLang, which is added after RLinf's, differs from it."""

ROWS, BATCH, MINI_BATCH, EPOCHS = 2101, 512, 128, 15

VERL: dict[str, tuple[str, object]] = {
    "model.path": ("model.path", "Qwen/Qwen2.5-VL-7B-Instruct"),
    "algorithm.advantage.name": ("algorithm.adv_estimator", "grpo"),
    "rollout.prompts_per_step": ("data.train_batch_size", BATCH),
    "rollout.samples_per_prompt": ("rollout.n", 5),
    "data.max_prompt_tokens": ("data.max_prompt_length", 1024),
    "rollout.max_new_tokens": ("data.max_response_length", 2048),
    "data.on_bad_row": ("data.filter_overlong_prompts", "skip"),
    "rollout.temperature": ("rollout.temperature", 1.0),
    "rollout.top_p": ("rollout.top_p", 1.0),
    "algorithm.minibatches": ("train_batch_size / actor.ppo_mini_batch_size", BATCH // MINI_BATCH),
    "algorithm.ppo_epochs": ("actor.ppo_epochs", 1),
    "algorithm.kl.name": ("actor.use_kl_loss", "loss"),
    "algorithm.kl.coef": ("actor.kl_loss_coef", 0.01),
    "algorithm.kl.estimator": ("actor.kl_loss_type low_var_kl", "k3"),
    "algorithm.entropy_coef": ("actor.entropy_coeff", 0.0),
    "algorithm.loss.name": ("actor.policy_loss.loss_mode vanilla", "clip"),
    "algorithm.loss.clip_low": ("actor.clip_ratio_low", 0.2),
    "algorithm.loss.clip_high": ("actor.clip_ratio_high", 0.2),
    "algorithm.loss.dual_clip": ("actor.clip_ratio_c", 3.0),
    "algorithm.aggregation": ("actor.loss_agg_mode", "token-mean"),
    "train.learning_rate": ("actor.optim.lr", 1e-6),
    "train.betas": ("actor.optim.betas", [0.9, 0.999]),
    "train.weight_decay": ("actor.optim.weight_decay", 0.01),
    "train.lr_warmup_steps": ("actor.optim.lr_warmup_steps_ratio 0", 0),
    "train.lr_schedule": ("actor.optim.lr_scheduler_type", "constant"),
    "train.max_grad_norm": ("actor.grad_clip", 1.0),
    "train.gradient_checkpointing": ("model.enable_gradient_checkpointing", "full"),
    "train.enable_dynamic_batch_size": ("actor.use_dynamic_bsz", True),
    "train.max_tokens_per_microbatch": ("actor.ppo_max_token_len_per_gpu", 6144),
    "model.freeze_vision_tower": ("actor.freeze_vision_tower", False),
    "model.dtype": ("fsdp's param_dtype", "bfloat16"),
    "environment.format_weight": ("reward_score/geo3k.py", 0.1),
    "environment.think_tags": ("reward_score/geo3k.py", True),
    "checkpoint.every_steps": ("trainer.save_freq", 20),
    "evaluate.every_steps": ("trainer.test_freq", 5),
    "max_steps": ("trainer.total_epochs, each without its last batch", EPOCHS * (ROWS // BATCH)),
    "plan.gpus": ("trainer.n_gpus_per_node", 8),
}
VERL_VLLM: dict[str, tuple[str, object]] = {
    "rollout.engine.name": ("rollout.name $ENGINE", "vllm"),
    "rollout.engine.gpu_memory_utilization": ("rollout.gpu_memory_utilization", 0.6),
    "rollout.engine.enable_chunked_prefill": ("rollout.enable_chunked_prefill", False),
    "rollout.engine.enforce_eager": ("rollout.enforce_eager", False),
}
"""Where the recipe with vLLM, which is added after verl's, differs from it."""
MEGATRON: dict[Path, dict[str, tuple[str, object]]] = {
    MEGATRON_QWEN2_5: {
        "model.path": ("model.path", "Qwen/Qwen2.5-VL-7B-Instruct"),
        "train.backend.name": ("config-name ppo_megatron_trainer.yaml", "megatron"),
        "train.backend.tensor_parallel_size": ("actor.megatron.tensor_model_parallel_size", 2),
        "train.backend.pipeline_parallel_size": ("actor.megatron.pipeline_model_parallel_size", 1),
        "train.backend.sequence_parallel": ("actor.megatron.sequence_parallel, by default", True),
        # the same number of sequences of 1,024 + 2,048 tokens, each counted with its prompt there
        "train.max_tokens_per_microbatch": ("actor.ppo_max_token_len_per_gpu 5120", 4096),
        "train.gradient_checkpointing": ("recompute_granularity is not set", "none"),
    },
    MEGATRON_QWEN3: {
        "model.path": ("model.path", "Qwen/Qwen3-VL-8B-Instruct"),
        "train.backend.name": ("config-name ppo_megatron_trainer.yaml", "megatron"),
        "train.backend.tensor_parallel_size": ("actor.megatron.tensor_model_parallel_size", 2),
        "train.backend.pipeline_parallel_size": ("actor.megatron.pipeline_model_parallel_size", 2),
        "train.backend.sequence_parallel": ("actor.megatron.sequence_parallel, by default", True),
        "train.max_tokens_per_microbatch": ("actor.ppo_max_token_len_per_gpu", 4096),
        "train.gradient_checkpointing": ("recompute_granularity, recompute_method, recompute_num_layers", "full"),
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


@table(
    ("recipes", "key", "theirs", "value"),
    [(recipes, key, *entry) for recipes, table in TABLES for key, entry in table.items()],
)
def test_the_recipe_has_their_value(recipes: tuple[Path, ...], key: str, theirs: str, value: object) -> None:
    ours = leaves(load_config(recipes, []).model_dump(mode="json"))
    assert ours[key] == value, theirs


def test_the_tables_have_the_numbers_of_their_files() -> None:
    """RLinf's YAML and verl's script, as the tests of `fovea import-config` have them."""
    rlinf = leaves(read_yaml(RLINF_FILE, "RLinf"))
    verl = dict(word.split("=", 1) for word in shlex.split(VERL_FILE) if "=" in word)
    verl = {key.removeprefix("actor_rollout_ref."): read_yaml(value, key) for key, value in verl.items()}
    for file, tables, least in ((rlinf, (RLINF, RLINF_SGLANG), 15), (verl, (VERL, VERL_VLLM), 8)):
        entries = [entry for table in tables for entry in table.values()]
        stated = {theirs: value for theirs, value in entries if type(file.get(theirs)) in (int, float)}
        assert len(stated) >= least
        assert {theirs: file[theirs] for theirs in stated} == stated
    assert (rlinf["runner.max_epochs"], rlinf["runner.resume_dir"]) == (25, "auto")
    assert all(f"runner.{key}" in RECIPE.read_text(encoding="utf-8") for key in ("max_epochs 25", "resume_dir auto"))


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
