"""Settings of verl that are read together, or have another unit here; elsewhere.yaml has those that have neither."""

from __future__ import annotations

from collections.abc import Iterator

from fovea.config.type_text import show
from fovea.tools.importer.source import (
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
"""Their estimator: our algorithm and advantage."""
LOSSES = {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo"}
RESUME = {"auto": "auto", "disable": "never"}
IN_THE_LOSS = {"low_var_kl": "k3", "k3": "k3", "low_var_kl+": "k3+", "k3+": "k3+", "mse": "k2", "k2": "k2"}
IN_THE_LOSS |= {"mse+": "k2", "k2+": "k2"}
IN_THE_REWARD = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""Their names of Schulman's estimators, and ours."""


def environment(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """The environment, which in verl every row names; that of Geometry3K scores the form as verl's does."""
    if theirs.environment is None:
        raise theirs.refuse(
            "data.reward_fn_key",
            "verl picks the grader of a row by this column, which settings do not hold; add --environment geo3k, vqa "
            "or caption",
        )
    said = f"--environment {theirs.environment}"
    yield theirs.line("environment.name", theirs.environment, "data.reward_fn_key", why=said)
    if theirs.environment == "geo3k" and theirs.value("custom_reward_function.path") is None:
        grader = "verl's own grader of Geometry3K: 0.9 for the answer, 0.1 for think tags before a box"
        yield theirs.line("environment.format_weight", 0.1, why=grader)
        yield theirs.line("environment.think_tags", True, why=grader)


def bad_rows(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    drops = theirs.value("data.filter_overlong_prompts")
    cuts = theirs.value("data.truncation")
    if cuts != "error" and not drops:
        yield from theirs.left("data.truncation", "a prompt is never cut; a longer one is an error")
    yield theirs.line(
        "data.on_bad_row", "skip" if drops else "error", "data.filter_overlong_prompts", "data.truncation"
    )


def reward(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    path, name = "custom_reward_function.path", "custom_reward_function.name"
    file = theirs.value(path)
    if isinstance(file, str):
        why = "the function's arguments are others here (docs/own.md)"
        yield theirs.line("reward", f"{file}:{theirs.value(name)}", path, name, why=why)
    elif file is not None:
        yield from theirs.left(path, f"{show(file)} is not a file")


def overlong(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """DAPO's penalty, whose buffer is a number of tokens in verl and a share of the longest completion here."""
    places = ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg")
    for place in (each for each in places if theirs.value(f"{each}.enable")):
        longest = theirs.value("data.max_response_length")
        if theirs.value(f"{place}.len") is None:
            raise theirs.refuse(f"{place}.enable", f"it needs {place}.len; add it")
        read = (f"{place}.enable", f"{place}.len", "data.max_response_length")
        yield theirs.line("algorithm.overlong.buffer_frac", theirs.value(f"{place}.len") / longest, *read)
        if theirs.value(f"{place}.penalty_factor") is not None:
            factor = f"{place}.penalty_factor"
            yield theirs.same("algorithm.overlong.penalty_factor", factor)


def lora(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    rank = f"{MODEL}.lora_rank"
    if not theirs.value(rank):
        return
    yield theirs.same("model.lora.rank", rank)
    of = {
        "alpha": "lora_alpha",
        "targets": "target_modules",
        "exclude": "exclude_modules",
        "adapter": "lora_adapter_path",
    }
    for ours, name in of.items():
        value = theirs.value(f"{MODEL}.{name}")
        if value is not None:
            yield theirs.line(f"model.lora.{ours}", value, f"{MODEL}.{name}")


def warmup(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Warm-up steps, which verl may write as a share of all steps."""
    steps, share = f"{ACTOR}.optim.lr_warmup_steps", f"{ACTOR}.optim.lr_warmup_steps_ratio"
    total = "trainer.total_training_steps"
    if (theirs.value(steps) or 0) > 0:
        yield theirs.same("train.lr_warmup_steps", steps)
    elif not theirs.value(share):
        yield theirs.line("train.lr_warmup_steps", 0, steps, share)
    elif theirs.value(total) is None:
        raise theirs.refuse(share, f"a share of a number of steps that is not known; add {total}=N, or {steps}=N")
    else:
        yield theirs.line("train.lr_warmup_steps", int(theirs.value(share) * theirs.value(total)), share, total)


def minibatches(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Optimizer steps of a pass, of which verl sets the size, in prompts."""
    size = f"{ACTOR}.ppo_mini_batch_size"
    prompts, of_one = theirs.value(TRAIN_BATCH), theirs.value(size)
    if prompts % of_one:
        raise theirs.refuse(
            size, f"{TRAIN_BATCH}={prompts} is not a multiple of it, so that it is not a number of steps"
        )
    yield theirs.line("algorithm.minibatches", prompts // of_one, TRAIN_BATCH, size)


def microbatches(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    by_tokens, tokens = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"
    yield from by_tokens_or_groups(theirs, by_tokens, tokens, f"{ACTOR}.ppo_micro_batch_size_per_gpu", N)


def clip(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    mode = f"{ACTOR}.policy_loss.loss_mode"
    loss = theirs.one_of(mode, LOSSES, "loss")
    yield theirs.line("algorithm.loss.name", loss, mode)
    if loss == "sapo":
        for ours, name in (("positive", "tau_pos"), ("negative", "tau_neg")):
            yield theirs.same(f"algorithm.loss.temperature_{ours}", f"{ACTOR}.{name}")
        return
    yield from _clip_bounds(theirs)
    if loss != "cispo":
        yield theirs.same("algorithm.loss.dual_clip", f"{ACTOR}.clip_ratio_c")


def _clip_bounds(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """The two bounds; verl reads clip_ratio only where they are null, and by default they are not."""
    both = f"{ACTOR}.clip_ratio"
    for side in ("low", "high"):
        key = f"{both}_{side}"
        own = theirs.value(key)
        if own is None:
            yield theirs.same(f"algorithm.loss.clip_{side}", both)
            continue
        if theirs.is_given(both) and not theirs.is_given(key) and theirs.value(both) != own:
            raise theirs.refuse(both, f"without effect in verl, where {key}={own} by default; set that one too")
        yield theirs.line(f"algorithm.loss.clip_{side}", own, key)


def algorithm(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    name, advantage = theirs.one_of(ESTIMATOR, ALGORITHMS, "advantage")
    read: tuple[str, ...] = (ESTIMATOR,)
    if advantage == "grpo" and theirs.value(BY_DEVIATION) is False:
        name, advantage, read = "dr_grpo", "dr_grpo", (ESTIMATOR, BY_DEVIATION)
    yield theirs.line("algorithm.name", name, *read)
    yield theirs.line("algorithm.advantage.name", advantage, *read)
    if name == "ppo":
        yield theirs.line("algorithm.max_policy_kl", None, why="verl never ends the passes of a step early")


def gae(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    if theirs.value(ESTIMATOR) == "gae":
        yield theirs.same("algorithm.advantage.gamma", "algorithm.gamma")
        yield theirs.same("algorithm.advantage.gae_lambda", "algorithm.lam")


def critic(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """The value function of PPO, in verl a separate model."""
    if theirs.value(ESTIMATOR) != "gae":
        return
    place, path = "algorithm.advantage.critic", "critic.model.path"
    if theirs.value(path) not in (None, theirs.value(f"{MODEL}.path")):
        yield from theirs.left(path, "a critic starts from the policy's own weights")
        yield theirs.line(f"{place}.trunk", "separate", ESTIMATOR, why="the critic of verl is a separate model")
    else:
        yield theirs.line(f"{place}.trunk", "separate", ESTIMATOR, path, why="the critic of verl is a separate model")
    of = {
        "learning_rate": "critic.optim.lr",
        "value_clip": "critic.cliprange_value",
        "warmup_steps": "trainer.critic_warmup",
    }
    for ours, key in of.items():
        yield theirs.same(f"{place}.{ours}", key)


def kl(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """The KL term: in the loss, in the reward, or none."""
    in_loss, in_reward = f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
    if theirs.value(in_loss) and theirs.value(in_reward):
        raise theirs.refuse(in_reward, f"and {in_loss} is true too, but a run has one KL term; leave one out")
    if theirs.value(in_loss):
        yield from kl_in_loss(theirs, in_loss, f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type", IN_THE_LOSS)
    elif theirs.value(in_reward):
        yield from _kl_in_reward(theirs, in_reward)
    else:
        yield theirs.line("algorithm.kl", None, in_loss, in_reward)


def _kl_in_reward(theirs: SourceConfig, switch: str) -> Iterator[RecipeLine | LeftOut]:
    place = "algorithm.kl_ctrl"
    yield theirs.line("algorithm.kl.name", "reward", switch)
    yield theirs.same("algorithm.kl.coef", f"{place}.kl_coef")
    estimator = theirs.one_of("algorithm.kl_penalty", IN_THE_REWARD, "estimator")
    yield theirs.line("algorithm.kl.estimator", estimator, "algorithm.kl_penalty")
    if theirs.value(f"{place}.type") == "adaptive":
        target, horizon = f"{place}.target_kl", f"{place}.horizon"
        yield theirs.line("algorithm.kl.controller.target", theirs.value(target), f"{place}.type", target)
        yield theirs.same("algorithm.kl.controller.horizon_samples", horizon)
    else:
        yield theirs.line("algorithm.kl.controller", None, f"{place}.type")


def importance(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """The correction for an engine whose probabilities are not the trainer's; `tis_imp_ratio_cap` is its older form."""
    cap, place = f"{ACTOR}.tis_imp_ratio_cap", "algorithm.rollout_correction"
    level, threshold, bypass = f"{place}.rollout_is", f"{place}.rollout_is_threshold", f"{place}.bypass_mode"
    weighs, old_cap = theirs.value(level), theirs.value(cap)
    if theirs.value(bypass):
        yield theirs.line("algorithm.old_logprobs", "engine", bypass)
        yield from theirs.left(level, "with the engine's log-probs as the old ones every weight is 1", matters=False)
    elif weighs is not None:
        yield theirs.line("algorithm.importance_sampling_fix", True, level)
        yield theirs.line("algorithm.importance_sampling_level", weighs, level)
        yield theirs.same("algorithm.importance_sampling_clip", threshold)
    elif old_cap is not None and old_cap > 0:
        yield theirs.line("algorithm.importance_sampling_fix", True, cap)
        yield theirs.line("algorithm.importance_sampling_clip", old_cap, cap)
    else:
        yield theirs.line("algorithm.importance_sampling_fix", False, level, cap)


def filter_groups(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    place = "algorithm.filter_groups"
    switch, metric, most = (f"{place}.{name}" for name in ("enable", "metric", "max_num_gen_batches"))
    if not theirs.value(switch):
        return
    if theirs.value(metric) not in (None, "acc"):
        yield from theirs.left(metric, "groups are compared only by accuracy")
    if (theirs.value(most) or 0) > 0:
        yield theirs.line("algorithm.dynamic_sampling.max_gen_batches", theirs.value(most), switch, metric, most)
    else:
        yield theirs.line("algorithm.dynamic_sampling", True, switch, metric)
        yield from theirs.left(most, "there is always a limit; algorithm.dynamic_sampling.max_gen_batches is 10")


def offload(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    keys = [f"{ACTOR}.fsdp_config.{name}" for name in ("param_offload", "optimizer_offload", "offload_policy")]
    given = [key for key in keys if theirs.is_given(key)]
    if runs_megatron(theirs):
        for key in given:
            yield from theirs.left(key, "Megatron trains, not FSDP", matters=bool(theirs.value(key)))
    elif given:
        yield theirs.line("train.backend.cpu_offload", any(map(theirs.value, given)), *given)


MEGATRON, STRATEGY = f"{ACTOR}.megatron", f"{ACTOR}.strategy"
CONFIG_NAME, MEGATRON_CONFIG = "--config-name", "ppo_megatron_trainer"
DIVIDED = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "expert_parallel_size": "expert_model_parallel_size",
}
"""Our settings of Megatron, and verl's names of them."""


def runs_megatron(theirs: SourceConfig) -> bool:
    """True if the actor is trained by Megatron, by its settings or the name of verl's own config, which is not here."""
    named = str(theirs.value(CONFIG_NAME) if theirs.is_given(CONFIG_NAME) else "").removesuffix(".yaml")
    has_settings = any(key.startswith(f"{MEGATRON}.") for key in theirs.given)
    return theirs.value(STRATEGY) == "megatron" or has_settings or named == MEGATRON_CONFIG


def backend(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """FSDP2, or Megatron with the GPUs that it divides a model over."""
    if not runs_megatron(theirs):
        known = theirs.value(STRATEGY) in ("fsdp", "fsdp2")
        yield from theirs.left(STRATEGY, "FSDP2, which is the default", matters=not known)
        return
    yield theirs.line("train.backend.name", "megatron", STRATEGY, why="settings or config of Megatron")
    for ours, name in DIVIDED.items():
        yield theirs.same(f"train.backend.{ours}", f"{MEGATRON}.{name}")
    tensor, sequence = f"{MEGATRON}.{DIVIDED['tensor_parallel_size']}", f"{MEGATRON}.sequence_parallel"
    if theirs.value(tensor) > 1:
        yield theirs.same("train.backend.sequence_parallel", sequence)
    yield theirs.same("train.backend.optimizer_offload", f"{MEGATRON}.optimizer_offload")


def recomputed(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    """Layers whose activations are computed again: verl's Megatron has another setting for that."""
    of_fsdp = f"{MODEL}.enable_gradient_checkpointing"
    of_megatron = f"{MEGATRON}.override_transformer_config.recompute_granularity"
    key = of_megatron if runs_megatron(theirs) else of_fsdp
    whole = theirs.value(key) == "full" if key == of_megatron else theirs.value(key)
    yield theirs.line("train.gradient_checkpointing", "full" if whole else "none", key)
    if theirs.value(of_megatron) == "selective":
        yield from theirs.left(of_megatron, "under Megatron whole layers are computed again, or none")


def engine(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    name = f"{ROLLOUT}.name"
    if theirs.value(name) not in ("vllm", "sglang"):
        raise theirs.refuse(name, "verl needs an engine, and vllm and sglang are here too; set it to one of them")
    yield theirs.same("rollout.engine.name", name)


def steps(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    total = "trainer.total_training_steps"
    yield from epochs_and_steps(theirs, "trainer.total_epochs", total, has_steps=theirs.value(total) is not None)


def run_dir(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    folder, project, name = "trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name"
    mode, path = "trainer.resume_mode", "trainer.resume_from_path"
    if theirs.value(folder) is not None:
        yield theirs.same("run_dir", folder)
    elif theirs.value(project) is not None and theirs.value(name) is not None:
        yield theirs.line("run_dir", f"checkpoints/{theirs.value(project)}/{theirs.value(name)}", project, name)
    elif not theirs.is_given(mode):
        return  # a new folder for each run, in which there is nothing to resume
    read = (mode, path) if theirs.value(mode) == "resume_path" else (mode,)
    resume = theirs.one_of(mode, {**RESUME, "resume_path": theirs.value(path)}, "mode")
    yield theirs.line("resume", resume, *read)


def loggers(theirs: SourceConfig) -> Iterator[RecipeLine | LeftOut]:
    key = "trainer.logger"
    if (named := theirs.value(key)) is not None:
        yield theirs.line("log.progress", "console" in named, key)
    project = "trainer.project_name"
    yield from trackers(theirs, key, project, default_project="verl_examples", needless=("console", "file"))


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        algorithm,
        backend,
        bad_rows,
        clip,
        critic,
        engine,
        environment,
        filter_groups,
        gae,
        importance,
        kl,
        loggers,
        lora,
        microbatches,
        minibatches,
        offload,
        overlong,
        recomputed,
        reward,
        run_dir,
        steps,
        warmup,
    )
}
