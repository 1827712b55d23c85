"""Steps of GRPO on a tiny model, by either backend and on two ranks of Megatron: what a test compares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from fovea.advantages import with_advantages
from fovea.config.algorithm import Algorithm
from fovea.config.run import Config
from fovea.models.load import load_network
from fovea.models.processor import load_processor
from fovea.models.tiny import TinyParts
from fovea.train.base import Needs, SftExample
from fovea.train.torch.policy import make_policy
from fovea.train.update import TrainedPolicy
from fovea.wiring.model import make_vlm
from tests.policies import make_batch, weights_of, with_rewards
from tests.process_ranks import run_group
from tests.tiny_models import mixed_prompts, random_completions, tiny

NUM_STEPS = 4
WARMED_UP = ("qwen3_vl",)
"""Families that take supervised steps first; others have the loaded model as the reference of the KL term."""
SAVED_AFTER = 2
SIZES = {"num_layers": 2, "num_kv_heads": 2, "vocabulary_size": 318}
"""What can be divided in two."""
COMPARED = ("loss", "grad_norm", "entropy", "kl/policy", "kl/reference", "banned_mass", "mismatch/abs")
COMPARED_VALUES = ("grad_norm/value", "value_loss", "learning_rate/value")
ADAM_EPS = 1e-5
"""Larger than usual: where a gradient is next to 0, AdamW's step would have the sign of rounding errors."""
RESUMED = "resumed"
"""Begin of the names of the files of the steps from a checkpoint."""
CRITIC = {"learning_rate": 1e-2}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"minibatches": 1, "ppo_epochs": 2, "advantage": {"critic": {**CRITIC, "warmup_steps": 1}}},
    "ppo, detached": {"name": "ppo", "minibatches": 1, "advantage": {"critic": {**CRITIC, "trunk": "detached"}}},
    "grpo, lora": {"name": "grpo"},
    "grpo, lora, no warm-up": {"name": "grpo"},
}
"""What is set beside the name. The value function alone is trained in the first step of PPO. No minibatch is without
images: the torch backend takes no step of the vision tower on such a one, Megatron that of its momentum."""
LORA = {"rank": 4, "alpha": 8, "exclude": [r"layers\.1\.mlp", "k_proj"]}
"""Layers without an adapter, and one that has no adapter beside others that have."""
SECTIONS: dict[str, dict[str, Any]] = {
    "grpo, lora": {"model": {"lora": LORA}},
    "grpo, lora, no warm-up": {"model": {"lora": LORA}, "warmup": None},
}
"""Other sections beside an algorithm. Without a warm-up, the model with its adapters off is the reference."""
Case = tuple[str, Path, Mapping[str, float], str]
"""Family and folder of a model, settings of the backend, and the algorithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What some steps of a policy have computed."""

    metrics: list[dict[str, float]]
    logprobs: list[list[float]]
    """Log-probs of all actions before each step."""
    weights: Mapping[str, torch.Tensor]
    """The weights after the last one, by transformers' names."""
    warmup_losses: list[float]
    """Of the supervised steps before them."""
    values: list[list[float]]
    """Values of all actions before each step, by PPO's value function."""


def settings_of(folder: Path, algorithm: str = "grpo", **sections: Any) -> Config:
    """A run's settings with this model; minibatches or epochs, and a KL term: every part of an update has work."""
    others = dict(SECTIONS.get(algorithm, {}))
    given = {
        "run_dir": str(folder / "run"),
        "max_steps": 10,
        "environment": {"name": "shapes"},
        "model": {"path": str(folder)} | others.pop("model", {}) | sections.pop("model", {}),
        "rollout": {"temperature": 0.9},
        "algorithm": {"name": algorithm, "entropy_coef": 0.01, "minibatches": 2, "kl": {"name": "loss", "coef": 0.05}}
        | ALGORITHMS[algorithm],
    }
    train = {"learning_rate": 1e-3, "adam_eps": ADAM_EPS, "max_grad_norm": 0.5, "weight_decay": 0.1}
    given["train"] = {**train, "max_tokens_per_microbatch": 120, **sections.pop("train", {})}
    given["warmup"] = {"learning_rate": 1e-2, "lr_warmup_steps": 2}
    return Config.model_validate(given | others | sections)


def run_steps(
    policy: TrainedPolicy, parts: TinyParts, algorithm: Algorithm, steps: Sequence[int] = range(NUM_STEPS)
) -> Steps:
    """Train on batches with rows of no, one and two images of unequal size."""
    warmup_losses = warm_up(policy, parts) if 0 in steps and parts.processor.family.model_type in WARMED_UP else []
    metrics, logprobs, values = [], [], []
    has_values = algorithm.critic is not None
    needs = Needs(old_logprobs=True, reference_logprobs=True, values=has_values)
    for step in steps:
        batch = policy.compute_logprobs(make_batch(parts, seed=step), needs)
        if has_values:
            values.append(joined(sample.values_T for sample in batch.samples))
            batch, _ = with_advantages(with_rewards(batch), algorithm, 0.0)
        logprobs.append(joined(sample.old_logprobs_T for sample in batch.samples))
        found = policy.update(batch)
        metrics.append({name: found[name] for name in (*COMPARED, *(COMPARED_VALUES if has_values else ()))})
    return Steps(
        metrics=metrics,
        logprobs=logprobs,
        weights={name: weight.detach().clone() for name, weight in weights_of(policy).items()},
        warmup_losses=warmup_losses,
        values=values,
    )


def joined(arrays: Iterable[NDArray[np.float32] | None]) -> list[float]:
    return [float(x) for array in arrays if array is not None for x in array]


def warm_up(policy: TrainedPolicy, parts: TinyParts) -> list[float]:
    """Three supervised steps, of which the last one has a single pair, so that a share has none."""
    pairs = mixed_pairs(parts)
    with patch("fovea.train.adamw.WARMUP_EPS", ADAM_EPS):
        losses = [policy.sft(some)["loss"] for some in (pairs, pairs[1:], pairs[:1])]
    policy.snapshot_reference()
    return losses


def mixed_pairs(parts: TinyParts) -> list[SftExample]:
    """An answer to each of `mixed_prompts`."""
    pairs = zip(mixed_prompts(parts), random_completions([[4], [2], [3]]), strict=True)
    return [SftExample(prompt=prompt, answer_ids=tuple(ids.tolist())) for prompt, (ids,) in pairs]


def torch_steps(config: Config, parts: TinyParts) -> Steps:
    """The steps by the torch backend in this process."""
    vlm = make_vlm(config, load_network(config.model), parts.processor.banned_ids)
    return run_steps(make_policy(config, vlm), parts, config.algorithm)


def megatron_steps(case: Case, checkpoint: Path | None = None, recompute: str = "none") -> Steps:
    """The steps by Megatron on all ranks of torch.distributed, or only on this process; saved after `SAVED_AFTER`."""
    family, folder, backend, algorithm = case
    settings, parts = settings_of(folder, algorithm).algorithm, tiny(family, **SIZES)
    with megatron_policy(folder, algorithm, recompute=recompute, **backend) as policy:
        first = run_steps(policy, parts, settings, range(SAVED_AFTER))
        if checkpoint is not None:
            checkpoint.mkdir(exist_ok=True)
            policy.save(checkpoint)
            policy.finish_save()
        later = run_steps(policy, parts, settings, range(SAVED_AFTER, NUM_STEPS))
    lists = ("metrics", "logprobs", "warmup_losses", "values")
    return replace(later, **{name: getattr(first, name) + getattr(later, name) for name in lists})


def resumed_steps(case: Case, checkpoint: Path) -> Steps:
    """The steps after a checkpoint."""
    family, folder, backend, algorithm = case
    settings = settings_of(folder, algorithm).algorithm
    with megatron_policy(folder, algorithm, **backend) as policy:
        policy.load(checkpoint)
        return run_steps(policy, tiny(family, **SIZES), settings, range(SAVED_AFTER, NUM_STEPS))


@contextmanager
def megatron_policy(
    folder: Path,
    algorithm: str = "grpo",
    *,
    recompute: str = "none",
    model: Mapping[str, bool | str] = MappingProxyType({}),
    train: Mapping[str, int] = MappingProxyType({}),
    **backend: int,
) -> Iterator[TrainedPolicy]:
    """A policy of the model in `folder`, whose process groups of Megatron's are there until the block ends.

    `model` and `train` have more settings of these sections.
    """
    # after the stand-ins
    from megatron.core import parallel_state  # noqa: PLC0415

    from fovea.train.megatron.policy import MegatronPolicy  # noqa: PLC0415

    trained = {"backend": {"name": "megatron", **backend}, "gradient_checkpointing": recompute} | dict(train)
    config = settings_of(folder, algorithm, train=trained, model=dict(model))
    try:
        yield MegatronPolicy(config, config.model, load_processor(config.model).banned_ids)
    finally:
        parallel_state.destroy_model_parallel()


def steps_of_two_ranks(cases: Sequence[Case], folder: Path, resumed: Sequence[tuple[int, int]]) -> list[Steps]:
    """The steps of each case, one after another in the same two processes.

    The last steps are those of pairs of numbers: of the one case from the checkpoint of the other, of the same model.
    """
    run_group(_rank, cases, folder, resumed)
    names = [*range(len(cases)), *(f"{RESUMED}-{number}" for number in range(len(resumed)))]
    return [Steps(**torch.load(folder / f"{name}.pt", weights_only=True)) for name in names]


def checkpoint_of(folder: Path, number: int) -> Path:
    """The checkpoint after `SAVED_AFTER` steps of a case."""
    return folder / f"checkpoint-{number}"


def _rank(rank: int, cases: Sequence[Case], folder: Path, resumed: Sequence[tuple[int, int]]) -> None:
    """The first rank writes what all ranks have alike."""
    for number, case in enumerate(cases):
        steps = megatron_steps(case, checkpoint_of(folder, number))
        if rank == 0:
            torch.save(asdict(steps), folder / f"{number}.pt")
    for number, (case, writer) in enumerate(resumed):
        steps = resumed_steps(cases[case], checkpoint_of(folder, writer))
        if rank == 0:
            torch.save(asdict(steps), folder / f"{RESUMED}-{number}.pt")
