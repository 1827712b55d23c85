"""verl's settings that are read together or have another unit here; elsewhere.yaml lists the others."""

from __future__ import annotations

from collections.abc import Iterator

from fovea_gym.settings.type_text import show
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

ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "model", "rollout"))
TRAIN_BATCH, N = "data.train_batch_size", f"{ROLLOUT}.n"
ESTIMATOR, BY_DEVIATION = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"

ALGORITHMS = {
    "grpo": ("grpo", "grpo"),
    "gae": ("ppo", "gae"),
    "rloo": ("rloo", "rloo"),
    "rloo_vectorized": ("rloo", "rloo"),
    "grpo_vectorized": ("grpo", "grpo"),
    "reinforce_plus_plus": ("reinforce++", "reinforce++"),
    "reinforce_plus_plus_baseline": ("reinforce++_baseline", "reinforce++_baseline"),
}
"""Fovea's algorithm and advantage for each of verl's estimators."""
LOSSES = {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo"}
RESUME = {"auto": "auto", "disable": "never"}
IN_THE_LOSS = {"low_var_kl": "k3", "k3": "k3", "low_var_kl+": "k3+", "k3+": "k3+", "mse": "k2", "k2": "k2"}
IN_THE_LOSS |= {"mse+": "k2", "k2+": "k2"}
IN_THE_REWARD = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""Fovea's name for each of verl's names of Schulman's estimators."""


def environment(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Translate the environment, which each row names in verl; geo3k scores the format as verl does."""
    if source.environment is None:
        why = "verl picks a row's grader by this column, which the settings do not show; add --environment geo3k, vqa "
        raise source.refuse("data.reward_fn_key", f"{why}or caption")
    said = f"--environment {source.environment}"
    yield source.line("environment.name", source.environment, "data.reward_fn_key", why=said)
    if source.environment == "geo3k" and source.value("custom_reward_function.path") is None:
        grader = "verl's grader of Geometry3K: 0.9 for the answer, 0.1 for think tags before a box"
        yield source.line("environment.format_weight", 0.1, why=grader)
        yield source.line("environment.think_tags", True, why=grader)


def bad_rows(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    filters, cut = "data.filter_overlong_prompts", "data.truncation"
    drops = source.value(filters)
    if source.value(cut) != "error" and not drops:
        yield from source.left(cut, "prompts are never cut; a longer one is an error")
    yield source.line("data.on_bad_row", "skip" if drops else "error", filters, cut)


def reward(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    path, name = "custom_reward_function.path", "custom_reward_function.name"
    file = source.value(path)
    if isinstance(file, str):
        yield source.line(
            "reward", f"{file}:{source.value(name)}", path, name, why="called as verl calls it (docs/own.md)"
        )
    elif file is not None:
        yield from source.left(path, f"{show(file)} is not a file")


def overlong(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Translate DAPO's length penalty; its buffer is in tokens in verl, and a share of the longest completion here."""
    places = ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg")
    for place in (each for each in places if source.value(f"{each}.enable")):
        longest = source.value("data.max_response_length")
        if source.value(f"{place}.len") is None:
            raise source.refuse(f"{place}.enable", f"it needs {place}.len; add it")
        read = (f"{place}.enable", f"{place}.len", "data.max_response_length")
        yield source.line("algorithm.overlong.buffer_frac", source.value(f"{place}.len") / longest, *read)
        if source.value(f"{place}.penalty_factor") is not None:
            factor = f"{place}.penalty_factor"
            yield source.same("algorithm.overlong.penalty_factor", factor)


def lora(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    rank = f"{MODEL}.lora_rank"
    if not source.value(rank):
        return
    yield source.same("model.lora.rank", rank)
    of = {
        "alpha": "lora_alpha",
        "targets": "target_modules",
        "exclude": "exclude_modules",
        "adapter": "lora_adapter_path",
    }
    for ours, name in of.items():
        value = source.value(f"{MODEL}.{name}")
        if value is not None:
            yield source.line(f"model.lora.{ours}", value, f"{MODEL}.{name}")


def warmup(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Translate the warm-up steps, which verl may give as a share of all steps."""
    steps, share = f"{ACTOR}.optim.lr_warmup_steps", f"{ACTOR}.optim.lr_warmup_steps_ratio"
    total = "trainer.total_training_steps"
    if (source.value(steps) or 0) > 0:
        yield source.same("train.lr_warmup_steps", steps)
    elif not source.value(share):
        yield source.line("train.lr_warmup_steps", 0, steps, share)
    elif source.value(total) is None:
        raise source.refuse(
            share, f"it is a share of all steps, and their number is not set; add {total}=N or {steps}=N"
        )
    else:
        yield source.line("train.lr_warmup_steps", int(source.value(share) * source.value(total)), share, total)


def minibatches(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Translate the number of optimizer steps per pass; verl sets their size in prompts."""
    size = f"{ACTOR}.ppo_mini_batch_size"
    prompts, of_one = source.value(TRAIN_BATCH), source.value(size)
    if prompts % of_one:
        why = f"{TRAIN_BATCH}={prompts} is not a multiple of it; set it to a divisor"
        raise source.refuse(size, why)
    yield source.line("algorithm.minibatches", prompts // of_one, TRAIN_BATCH, size)


def microbatches(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    by_tokens, tokens = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"
    yield from by_tokens_or_groups(source, by_tokens, tokens, f"{ACTOR}.ppo_micro_batch_size_per_gpu", N)


def clip(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    mode = f"{ACTOR}.policy_loss.loss_mode"
    loss = source.one_of(mode, LOSSES, "loss")
    yield source.line("algorithm.loss.name", loss, mode)
    if loss == "sapo":  # sapo has temperatures in place of bounds
        return
    yield from _clip_bounds(source)
    if loss != "cispo":
        yield source.same("algorithm.loss.dual_clip", f"{ACTOR}.clip_ratio_c")


def _clip_bounds(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Translate the two bounds; verl reads clip_ratio only if they are null, which is not their default."""
    both = f"{ACTOR}.clip_ratio"
    for side in ("low", "high"):
        key = f"{both}_{side}"
        own = source.value(key)
        if own is None:
            yield source.same(f"algorithm.loss.clip_{side}", both)
            continue
        if source.is_given(both) and not source.is_given(key) and source.value(both) != own:
            raise source.refuse(both, f"without effect in verl, where {key}={own} by default; set that too")
        yield source.line(f"algorithm.loss.clip_{side}", own, key)


def algorithm(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    name, advantage = source.one_of(ESTIMATOR, ALGORITHMS, "advantage")
    read: tuple[str, ...] = (ESTIMATOR,)
    if advantage == "grpo" and source.value(BY_DEVIATION) is False:
        name, advantage, read = "dr_grpo", "dr_grpo", (ESTIMATOR, BY_DEVIATION)
    yield source.line("algorithm.name", name, *read)
    yield source.line("algorithm.advantage.name", advantage, *read)
    if name == "ppo":
        yield source.line("algorithm.max_policy_kl", None, why="verl never ends a step's passes early")


def critic(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Translate PPO's value function, which is a separate model in verl."""
    if source.value(ESTIMATOR) != "gae":
        return
    place, path, read = "algorithm.advantage.critic", "critic.model.path", [ESTIMATOR]
    if source.value(path) in (None, source.value(f"{MODEL}.path")):
        read.append(path)
    else:
        yield from source.left(path, "a critic starts from the policy's weights")
    yield source.line(f"{place}.trunk", "separate", *read, why="verl's critic is a separate model")
    of = {
        "learning_rate": "critic.optim.lr",
        "value_clip": "critic.cliprange_value",
        "warmup_steps": "trainer.critic_warmup",
    }
    for ours, key in of.items():
        yield source.same(f"{place}.{ours}", key)


def kl(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Translate the KL term, which is in the loss, in the reward, or off."""
    in_loss, in_reward = f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
    if source.value(in_loss) and source.value(in_reward):
        raise source.refuse(
            in_reward, f"{in_loss} is true too, but a run has only one KL term; set one of them to false"
        )
    if source.value(in_loss):
        yield from kl_in_loss(source, in_loss, f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type", IN_THE_LOSS)
    elif source.value(in_reward):
        yield from _kl_in_reward(source, in_reward)
    else:
        yield source.line("algorithm.kl", None, in_loss, in_reward)


def _kl_in_reward(source: SourceConfig, switch: str) -> Iterator[RecipeLine | LeftOut]:
    place = "algorithm.kl_ctrl"
    yield source.line("algorithm.kl.name", "reward", switch)
    yield source.same("algorithm.kl.coef", f"{place}.kl_coef")
    estimator = source.one_of("algorithm.kl_penalty", IN_THE_REWARD, "estimator")
    yield source.line("algorithm.kl.estimator", estimator, "algorithm.kl_penalty")
    if source.value(f"{place}.type") == "adaptive":
        target, horizon = f"{place}.target_kl", f"{place}.horizon"
        yield source.line("algorithm.kl.controller.target", source.value(target), f"{place}.type", target)
        yield source.same("algorithm.kl.controller.horizon_samples", horizon)
    else:
        yield source.line("algorithm.kl.controller", None, f"{place}.type")


def importance(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Translate the correction for engine log-probs that differ from the trainer's, or its older form."""
    cap, place = f"{ACTOR}.tis_imp_ratio_cap", "algorithm.rollout_correction"
    level, threshold, bypass = f"{place}.rollout_is", f"{place}.rollout_is_threshold", f"{place}.bypass_mode"
    weighs, old_cap = source.value(level), source.value(cap)
    if source.value(bypass):
        yield source.line("algorithm.old_logprobs", "engine", bypass)
        yield from source.left(level, "with the engine's log-probs as old log-probs, every weight is 1", matters=False)
    elif weighs is not None:
        yield source.line("algorithm.importance_sampling_fix", True, level)
        yield source.line("algorithm.importance_sampling_level", weighs, level)
        yield source.same("algorithm.importance_sampling_clip", threshold)
    elif old_cap is not None and old_cap > 0:
        yield source.line("algorithm.importance_sampling_fix", True, cap)
        yield source.line("algorithm.importance_sampling_clip", old_cap, cap)
    else:
        yield source.line("algorithm.importance_sampling_fix", False, level, cap)


def filter_groups(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    place = "algorithm.filter_groups"
    switch, metric, most = (f"{place}.{name}" for name in ("enable", "metric", "max_num_gen_batches"))
    if not source.value(switch):
        return
    if source.value(metric) not in (None, "acc"):
        yield from source.left(metric, "groups are compared only by accuracy")
    if (source.value(most) or 0) > 0:
        yield source.line("algorithm.dynamic_sampling.max_gen_batches", source.value(most), switch, metric, most)
    else:
        yield source.line("algorithm.dynamic_sampling", True, switch, metric)
        yield from source.left(most, "Fovea always has a limit; algorithm.dynamic_sampling.max_gen_batches is 10")


def offload(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    keys = [f"{ACTOR}.fsdp_config.{name}" for name in ("param_offload", "optimizer_offload", "offload_policy")]
    given = [key for key in keys if source.is_given(key)]
    if runs_megatron(source):
        for key in given:
            yield from source.left(key, "Megatron trains, not FSDP", matters=bool(source.value(key)))
    elif given:
        yield source.line("train.backend.cpu_offload", any(map(source.value, given)), *given)


MEGATRON, STRATEGY = f"{ACTOR}.megatron", f"{ACTOR}.strategy"
CONFIG_NAME, MEGATRON_CONFIG = "--config-name", "ppo_megatron_trainer"
DIVIDED = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "expert_parallel_size": "expert_model_parallel_size",
}
"""verl's name for each of Fovea's Megatron settings."""


def runs_megatron(source: SourceConfig) -> bool:
    """True if Megatron trains the actor, as its settings or the name of verl's Megatron config show."""
    named = str(source.value(CONFIG_NAME) if source.is_given(CONFIG_NAME) else "").removesuffix(".yaml")
    has_settings = any(key.startswith(f"{MEGATRON}.") for key in source.given)
    return source.value(STRATEGY) == "megatron" or has_settings or named == MEGATRON_CONFIG


def backend(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Translate the backend: FSDP2, or Megatron with its parallel sizes."""
    if not runs_megatron(source):
        known = source.value(STRATEGY) in ("fsdp", "fsdp2")
        yield from source.left(STRATEGY, "FSDP2, which is the default", matters=not known)
        return
    yield source.line("train.backend.name", "megatron", STRATEGY, why="Megatron's settings or config are used")
    for ours, name in DIVIDED.items():
        yield source.same(f"train.backend.{ours}", f"{MEGATRON}.{name}")
    tensor, sequence = f"{MEGATRON}.{DIVIDED['tensor_parallel_size']}", f"{MEGATRON}.sequence_parallel"
    if source.value(tensor) > 1:
        yield source.same("train.backend.sequence_parallel", sequence)
    yield source.same("train.backend.optimizer_offload", f"{MEGATRON}.optimizer_offload")


def recomputed(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Translate the recomputation of activations, which verl sets elsewhere for Megatron."""
    of_fsdp = f"{MODEL}.enable_gradient_checkpointing"
    of_megatron = f"{MEGATRON}.override_transformer_config.recompute_granularity"
    key = of_megatron if runs_megatron(source) else of_fsdp
    whole = source.value(key) == "full" if key == of_megatron else source.value(key)
    yield source.line("train.gradient_checkpointing", "full" if whole else "none", key)
    if source.value(of_megatron) == "selective":
        yield from source.left(of_megatron, "under Megatron, whole layers are recomputed or none")


def engine(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    name = f"{ROLLOUT}.name"
    if source.value(name) not in ("vllm", "sglang"):
        raise source.refuse(
            name, "verl needs an engine, and only vllm and sglang have a counterpart here; set it to one of them"
        )
    yield source.same("rollout.engine.name", name)


def steps(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    total = "trainer.total_training_steps"
    yield from epochs_and_steps(source, "trainer.total_epochs", total, has_steps=source.value(total) is not None)


def run_dir(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    folder, project, name = "trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name"
    mode, path = "trainer.resume_mode", "trainer.resume_from_path"
    if source.value(folder) is not None:
        yield source.same("run_dir", folder)
    elif source.value(project) is not None and source.value(name) is not None:
        yield source.line("run_dir", f"checkpoints/{source.value(project)}/{source.value(name)}", project, name)
    elif not source.is_given(mode):
        return  # each run gets a new folder, so nothing is resumed
    read = (mode, path) if source.value(mode) == "resume_path" else (mode,)
    resume = source.one_of(mode, {**RESUME, "resume_path": source.value(path)}, "mode")
    yield source.line("resume", resume, *read)


def loggers(source: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    key = "trainer.logger"
    if (named := source.value(key)) is not None:
        yield source.line("log.progress", "console" in named, key)
    project = "trainer.project_name"
    yield from trackers(source, key, project, default_project="verl_examples", needless=("console", "file"))


_RULES: tuple[Rule, ...] = (
    *(algorithm, backend, bad_rows, clip, critic, engine, environment, filter_groups, importance, kl, loggers),
    *(lora, microbatches, minibatches, offload, overlong, recomputed, reward, run_dir, steps, warmup),
)
RULES = {rule.__name__: rule for rule in _RULES}
