"""Supervised pairs until the dev readings say stop: enough for RL to find rewards, and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fovea.config import run as config
from fovea.data.order import Order
from fovea.environments.base import Environment
from fovea.environments.prompt_source import PromptSource
from fovea.train.torch.sft import Pair
from fovea.types import Evaluation


class TrainsPairs(Protocol):
    """`train.torch.sft.SupervisedTrainer`, or a stand-in."""

    def update(self, pairs: Sequence[Pair]) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup:
    """All that the stage needs."""

    settings: config.Warmup
    order: Order
    source: PromptSource
    environment: Environment
    answer_ids: Callable[[str], tuple[int, ...]]
    make_trainer: Callable[[], TrainsPairs]
    """Made when the stage begins, so that its optimizer is gone when it ends."""


def warm_up(stage: Warmup, read_dev: Callable[[], Evaluation], report: Callable[[str], None]) -> int:
    """Train until the stop rule holds or max_steps is reached; returns the steps taken."""
    settings, trainer = stage.settings, stage.make_trainer()
    for step in range(1, settings.max_steps + 1):
        loss = trainer.update(_next_pairs(stage))
        if step % settings.check_every_steps == 0:
            dev = read_dev()
            report(f"warm-up {step}/{settings.max_steps}  loss {loss:.2f}  dev accuracy {dev.accuracy:.2f}")
            if enough(dev, settings):
                return step
    return settings.max_steps


def enough(dev: Evaluation, settings: config.Warmup) -> bool:
    """The stop rule: overall accuracy, and that of each named question type."""
    reached = {kind: sum(values) / len(values) for kind, values in dev.accuracies.items()}
    return dev.accuracy >= settings.stop_accuracy and all(
        reached.get(kind, 0.0) >= wanted for kind, wanted in settings.stop_kind_accuracy.items()
    )


def _next_pairs(stage: Warmup) -> list[Pair]:
    return [
        Pair(prompt=row.prompt, answer_ids=stage.answer_ids(stage.environment.target(row.task)))
        for row in stage.source.take(stage.order, stage.settings.batch_size)
    ]
