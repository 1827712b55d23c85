"""RLinf's settings that are read together or have another unit here; elsewhere.yaml lists the others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from fovea_tools.importer.source import (
    LeftOut,
    RecipeLine,
    Rule,
    SourceConfig,
    by_tokens_or_groups,
    epochs_and_steps,
    kl_in_loss,
    trackers,
)

GROUP, ADVANTAGE = "algorithm.group_size", "algorithm.adv_type"
SAMPLING, PLACEMENT = "algorithm.sampling_params", "cluster.component_placement"
ALGORITHMS = {
    "grpo": ("grpo", "grpo"),
    "gae": ("ppo", "gae"),
    "reinpp": ("reinforce++", "reinforce++"),
    "reinpp_baseline": ("reinforce++_baseline", "reinforce++_baseline"),
}
"""Fovea's algorithm and advantage for each of RLinf's advantages."""
ENVIRONMENTS = {"math": "geo3k", "vqa": "vqa"}
LOSSES = ("actor", "actor_critic", "ppo")
"""RLinf's names for the clipped loss."""
ESTIMATORS = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2"}
DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "32": "float32", "float32": "float32"}


def environment(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    key = "reward.reward_type"
    named, kind = source.environment, ENVIRONMENTS.get(str(source.value(key)))
    if named is not None and kind not in (None, named):
        raise source.refuse(
            key, f"this means environment.name={kind}, but --environment is {named}; remove --environment"
        )
    if named is None and kind is None:
        raise source.refuse(key, "no environment here has this type; add --environment geo3k, vqa or caption")
    yield source.line("environment.name", named or kind, key, why="" if kind else f"--environment {named}")


def reward_values(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Translate the rewards of right and wrong answers, each multiplied by the scale."""
    scale, kind = "reward.reward_scale", str(source.value("reward.reward_type"))
    if (source.environment or ENVIRONMENTS.get(kind)) != "geo3k":
        return
    for ours in ("reward_max_val", "reward_min_val"):
        value = source.value(f"reward.{ours}") * source.value(scale)
        yield source.line(f"environment.{ours}", value, f"reward.{ours}", scale)


def model(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    for key in ("rollout.model.model_path", "actor.model.model_path"):
        if source.value(key) is not None:
            yield source.line("model.path", str(source.value(key)).rstrip("/"), key)


def dtype(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Translate the dtype of computation; the optimizer's copy of the weights is float32 in any case."""
    mixed, own = "actor.fsdp_config.mixed_precision.param_dtype", "actor.model.precision"
    key = mixed if source.value(mixed) is not None else own
    value = source.value(key)
    if value is None:
        return
    if str(value) not in DTYPES:
        raise source.refuse(key, f"no such format exists here; set it to one of {', '.join(DTYPES)}")
    yield source.line("model.dtype", DTYPES[str(value)], key)
    if key == mixed:
        yield from source.left(own, "the optimizer's copy of the weights is always float32", matters=False)


def tokens(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Translate the longest prompt and the longest completion; RLinf also sets their sum."""
    prompt, total, own = "data.max_prompt_length", "runner.seq_length", f"{SAMPLING}.max_new_tokens"
    longest, both, new = source.value(prompt), source.value(total), source.value(own)
    if longest is not None:
        yield source.line("data.max_prompt_tokens", longest, prompt)
    if new is not None and None not in (longest, both) and new > both - longest:
        raise source.refuse(
            own, f"this is more than {total}={both} minus {prompt}={longest}; lower it, or raise {total}"
        )
    if new is not None:
        yield source.line("rollout.max_new_tokens", new, own)
    elif None not in (longest, both):
        yield source.line("rollout.max_new_tokens", both - longest, total, prompt)


def min_new_tokens(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    key = f"{SAMPLING}.min_new_tokens"
    if (source.value(key) or 0) > 1:
        yield source.same("rollout.engine.min_new_tokens", key)
    else:
        yield from source.left(key, "an empty completion is graded like any other", matters=False)


def bad_rows(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    key = "data.filter_prompt_by_length"
    drops = source.value(key)
    why = "" if drops else "RLinf cuts longer prompts; here they are an error"
    yield source.line("data.on_bad_row", "skip" if drops else "error", key, why=why)


def betas(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    keys = ("actor.optim.adam_beta1", "actor.optim.adam_beta2")
    yield source.line("train.betas", [source.value(key) for key in keys], *keys)


def warmup(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Translate the warm-up steps, which RLinf may give as a share of all steps."""
    counts = ("actor.optim.lr_warmup_steps", "actor.lr_sched.lr_warmup_iters")
    shares = ("actor.optim.lr_warmup_steps_ratio", "actor.lr_sched.lr_warmup_fraction")
    count = next((key for key in counts if (source.value(key) or 0) > 0), None)
    share = next((key for key in shares if source.value(key)), None)
    total = source.value("runner.max_steps")
    if count is not None and share is not None:
        raise source.refuse(share, f"{count}={source.value(count)} sets the warm-up too; set one of them to 0")
    if count is not None:
        yield source.same("train.lr_warmup_steps", count)
    elif share is None:
        yield source.line("train.lr_warmup_steps", 0, *counts, *shares)
    elif total is None or total < 1:
        yield from _share_of_unknown_steps(source, share)
    else:
        yield source.line("train.lr_warmup_steps", math.ceil(source.value(share) * total), share, "runner.max_steps")


def _share_of_unknown_steps(source: SourceConfig, share: str) -> Iterator[RecipeLine | LeftOut]:
    """Leave out a share of all steps if only the rows decide their number; RLinf's FSDP trainer ignores `lr_sched`."""
    reason = "it is a share of all steps, and their number is not set; add runner.max_steps=N after the file"
    if not share.startswith("actor.lr_sched.") or source.value("actor.training_backend") != "fsdp":
        raise source.refuse(share, reason)
    why = "RLinf's FSDP trainer does not read actor.lr_sched"
    yield source.line("train.lr_warmup_steps", 0, "actor.training_backend", why=why)
    yield from source.left(share, f"{reason}; RLinf's FSDP trainer does not read it either")


def microbatches(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    by_tokens, tokens = "runner.enable_dynamic_batch_size", "runner.max_tokens_per_mbs"
    yield from by_tokens_or_groups(source, by_tokens, tokens, "algorithm.training_batch_size_per_gpu", GROUP)


def algorithm(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    name, advantage = source.one_of(ADVANTAGE, ALGORITHMS, "advantage")
    yield source.line("algorithm.name", name, ADVANTAGE)
    yield source.line("algorithm.advantage.name", advantage, ADVANTAGE)
    if name == "ppo":
        yield source.line("algorithm.max_policy_kl", None, why="RLinf never ends the passes of a step early")
        yield source.line("algorithm.ppo_epochs", 1, why="RLinf makes one pass over the completions of a step")


def critic(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Translate PPO's value function, which is a separate model in RLinf."""
    if source.value(ADVANTAGE) != "gae":
        return
    place, switch = "algorithm.advantage.critic", "critic.use_critic_model"
    yield source.line(f"{place}.trunk", "separate", switch, why="RLinf's critic is a separate model")
    of = {
        "learning_rate": "critic.optim.lr",
        "value_clip": "algorithm.value_clip",
        "warmup_steps": "algorithm.critic_warmup_steps",
    }
    for ours, key in of.items():
        if source.is_given(key):
            yield source.same(f"{place}.{ours}", key)


def clip(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    kind, both = "algorithm.loss_type", "algorithm.ratio_clip_eps"
    if source.value(kind) not in LOSSES:
        raise source.refuse(kind, f"no such loss exists here; set it to one of {', '.join(LOSSES)}")
    yield source.line("algorithm.loss.name", "clip", kind)
    for side in ("low", "high"):
        own = f"algorithm.clip_ratio_{side}"
        key = both if source.value(own) is None else own
        yield source.same(f"algorithm.loss.clip_{side}", key)
    yield source.same("algorithm.loss.dual_clip", "algorithm.clip_ratio_c")


def kl(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    coef = "algorithm.kl_beta"
    yield from kl_in_loss(source, coef, coef, "algorithm.kl_penalty_type", ESTIMATORS)


def dynamic_sampling(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    key = "algorithm.max_num_gen_batches"
    if (source.value(key) or 1) > 1:
        yield source.same("algorithm.dynamic_sampling.max_gen_batches", key)


def engine(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    key = "rollout.rollout_backend"
    name = source.value(key)
    if name not in ("vllm", "sglang"):
        raise source.refuse(key, "only vllm and sglang have a counterpart here; set it to one of them")
    yield source.line("rollout.engine.name", name, key)


def steps(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    total = "runner.max_steps"
    yield from epochs_and_steps(source, "runner.max_epochs", total, has_steps=(source.value(total) or -1) > 0)


def run_dir(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    folder, name, resume = "runner.output_dir", "runner.experiment_name", "runner.resume_dir"
    if source.value(folder) is not None and source.value(name) is not None:
        yield source.line("run_dir", f"{source.value(folder)}/{source.value(name)}", folder, name)
    if source.is_given(resume):
        yield source.line("resume", source.value(resume) or "never", resume)


def loggers(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    yield from trackers(source, "runner.logger.logger_backends", "runner.logger.project_name")


def placement(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Translate the GPUs of actor and rollout: the same for both, or two ranges that do not overlap."""
    keys = [key for key in source.given if key == PLACEMENT or key.startswith(f"{PLACEMENT}.")]
    found: dict[str, tuple[str, Any]] = {}
    for key in keys:
        for part in key.removeprefix(f"{PLACEMENT}.").split(","):
            found[part.strip()] = (key, source.value(key))
    if "actor" not in found or "rollout" not in found:
        for key in keys:
            yield from source.left(key, "set cluster.placement, and cluster.rollout_gpus if it is not collocated")
        return
    (first, actor), (second, rollout) = found["actor"], found["rollout"]
    read = tuple(dict.fromkeys((first, second)))
    if actor == rollout:
        yield source.line("cluster.placement", "collocated", *read)
        if actor == "all":
            yield from _all_gpus(source, first)
    elif _gpus(actor) and _gpus(rollout) and not _gpus(actor) & _gpus(rollout):
        yield source.line("cluster.placement", "disaggregated", *read)
        yield source.line("cluster.rollout_gpus", len(_gpus(rollout)), second)
    else:
        for key in read:
            yield from source.left(key, "no such placement exists here; set cluster.placement and cluster.rollout_gpus")


def _all_gpus(source: SourceConfig, key: str) -> Iterator[RecipeLine | LeftOut]:
    """Use all GPUs of this machine if it has several; a single GPU needs no setting."""
    num_gpus = source.count_gpus()
    if num_gpus > 1:
        yield source.line("cluster.gpus_per_node", num_gpus, key, why="the GPUs of this machine")
    elif num_gpus == 0:
        reason = "this machine has no GPUs to count; set cluster.gpus_per_node=N in the recipe, or use torchrun"
        yield from source.left(key, reason)


def _gpus(text: Any) -> set[int]:
    """The GPU numbers in `0-3` or `5`; empty for any other text."""
    first, _, last = str(text).partition("-")
    is_range = first.isdigit() and (last or first).isdigit()
    return set(range(int(first), int(last or first) + 1)) if is_range else set()


_RULES: tuple[Rule, ...] = (
    *(algorithm, bad_rows, betas, clip, critic, dtype, dynamic_sampling, engine, environment, kl),
    *(loggers, microbatches, min_new_tokens, model, placement, reward_values, run_dir, steps, tokens, warmup),
)
RULES = {rule.__name__: rule for rule in _RULES}
