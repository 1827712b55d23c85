"""Supervised fine-tuning until the dev accuracy says stop: enough for RL to find rewards, and no more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fovea.config import run as config
from fovea.data.order import Order
from fovea.environments.base import Environment
from fovea.environments.prompt_source import PromptSource
from fovea.train.base import Pair, Policy
from fovea.types import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup:
    """The pairs of the warm-up, in an order of their own, and its stop rule."""

    settings: config.Warmup
    order: Order
    source: PromptSource
    environment: Environment
    answer_ids: Callable[[str], tuple[int, ...]]


async def warm_up(
    stage: Warmup, policy: Policy, read_dev: Callable[[], Awaitable[Evaluation]], report: Callable[[str], None]
) -> int:
    """Train until the stop rule holds or max_steps is reached; returns the steps taken."""
    settings = stage.settings
    for step in range(1, settings.max_steps + 1):
        metrics = await policy.sft(_next_pairs(stage))
        if step % settings.check_every_steps == 0:
            dev = await read_dev()
            report(f"warm-up {step}/{settings.max_steps}  loss {metrics['loss']:.2f}  dev accuracy {dev.accuracy:.2f}")
            if enough(dev, settings):
                return step
    return settings.max_steps


def enough(dev: Evaluation, settings: config.Warmup) -> bool:
    """Whether the overall accuracy, and that of each named question type, has reached its bound."""
    reached = {kind: sum(values) / len(values) for kind, values in dev.accuracies.items()}
    return dev.accuracy >= settings.stop_accuracy and all(
        reached.get(kind, 0.0) >= wanted for kind, wanted in settings.stop_kind_accuracy.items()
    )


def _next_pairs(stage: Warmup) -> list[Pair]:
    return [
        Pair(prompt=row.prompt, answer_ids=stage.answer_ids(stage.environment.target(row.task)))
        for row in stage.source.take(stage.order, stage.settings.batch_size)
    ]
