"""The warm-up: supervised fine-tuning until a dev accuracy, enough for RL to find rewards and no more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import numpy as np

from fovea.config import sections as config
from fovea.data.order import Order
from fovea.environments.base import Environment
from fovea.environments.prompt_source import PromptedTask, PromptSource
from fovea.rollout.collect import extended
from fovea.train.base import Policy, SftExample
from fovea.types import Evaluation, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupStage:
    """Settings, data order and sources of the warm-up."""

    settings: config.Warmup
    order: Order
    source: PromptSource
    environment: Environment
    answer_ids: Callable[[str, str], tuple[int, ...]]
    """(answer, name of its row) -> token ids."""


async def warm_up(
    stage: WarmupStage, policy: Policy, read_dev: Callable[[], Awaitable[Evaluation]], report: Callable[[str], None]
) -> int:
    """Train until the stop rule holds, or for `max_steps`; returns the steps taken."""
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
    """The stop rule: whether overall accuracy, and that of each named kind, have reached their bounds."""
    reached = {kind: sum(values) / len(values) for kind, values in dev.accuracies.items()}
    return dev.accuracy >= settings.stop_accuracy and all(
        reached.get(kind, 0.0) >= wanted for kind, wanted in settings.stop_kind_accuracy.items()
    )


def _next_pairs(stage: WarmupStage) -> list[SftExample]:
    rows = stage.source.take(stage.order, stage.settings.batch_size)
    return [pair for row in rows for pair in _pairs_of(stage, row)]


def _pairs_of(stage: WarmupStage, row: PromptedTask) -> Iterator[SftExample]:
    """Pairs of prompt and answer, one per turn of the demonstration; the prompt is the conversation so far."""
    environment, renderer, prompt = stage.environment, stage.source.renderer, row.prompt
    asked, turns = tuple(environment.prompt(row.task)), list[Turn]()
    for text in environment.demonstration(row.task):
        answer_ids = stage.answer_ids(text, f"a demonstration of {row.task.id}")
        yield SftExample(prompt=prompt, answer_ids=answer_ids)
        turns.append(Turn(messages=asked, text=text))
        messages = environment.reply(row.task, turns) if len(turns) < environment.max_turns else None
        if messages is None:
            return
        asked = tuple(messages)
        observation = renderer.observation(asked, after=answer_ids[-1], where=f"a demonstration of {row.task.id}")
        prompt = extended(prompt, np.asarray(answer_ids, dtype=np.int64), observation)
