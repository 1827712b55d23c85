"""recipes/geo3k.yaml is RLinf's run, key by key.

The right side of the table is qwen3-vl-2b-grpo-fsdp-geo3k.yaml of RLinf at commit 8804efd, under its own names, and the
750 steps are those of the curves in its documentation.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fovea.config.base import leaves
from fovea.config.loading import load_config

RECIPE = Path(__file__).parents[2] / "recipes" / "geo3k.yaml"
STEPS, SEQ_LENGTH, MAX_PROMPT_LENGTH = 750, 8192, 4096
LR_WARMUP_FRACTION = 0.01

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
    "train.lr_warmup_steps": ("actor.lr_sched.lr_warmup_fraction", math.ceil(LR_WARMUP_FRACTION * STEPS)),
    "max_steps": ("the curves of its documentation", STEPS),
    "environment.format_weight": ("reward_max_val 1, reward_min_val 0", 0),
    "model.dtype": ("mixed_precision.param_dtype", "bfloat16"),
    "train.gradient_checkpointing": ("fsdp_config.gradient_checkpointing", True),
    "train.enable_dynamic_batch_size": ("runner.enable_dynamic_batch_size", True),
}


@pytest.mark.parametrize("key", RLINF)
def test_the_recipe_has_rlinfs_value(key: str) -> None:
    ours = leaves(load_config([RECIPE], []).model_dump(mode="json"))
    theirs, value = RLINF[key]
    assert ours[key] == value, theirs


def test_the_header_names_what_it_takes_over() -> None:
    header = RECIPE.read_text(encoding="utf-8").partition("\nseed:")[0]
    for key in ("importance_sampling_fix", "loss_agg_func", "clip_ratio_low", "adam_beta2", "lr_warmup_fraction"):
        assert key in header
