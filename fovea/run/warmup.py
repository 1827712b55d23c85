"""The warm-up: supervised fine-tuning up to a dev accuracy that lets RL find rewards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fovea.config import sections as config
from fovea.data.order import Order
from fovea.data.prompt_source import PromptedTask, PromptSource
from fovea.errors import TrainError
from fovea.rollout.collect import extended
from fovea.train.base import Policy, SftExample
from fovea.types import Evaluation, Prompt
from fovea_gym.environments.base import Environment, Session
from fovea_gym.environments.sessions import unreadable
from fovea_gym.errors import DataError, FailedEpisodeError
from fovea_gym.types import Turn

SESSION_SEED = 0
"""Seed of the sessions in which demonstrations are replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupStage:
    """Settings, data order and sources of the warm-up."""

    settings: config.Warmup
    order: Order
    source: PromptSource
    environment: Environment
    answer_ids: Callable[[Prompt, str, str], tuple[int, ...]]
    """Maps (prompt, answer, name of the row) to token ids."""


async def warm_up(
    stage: WarmupStage,
    policy: Policy,
    read_dev: Callable[[], Awaitable[Evaluation]],
    report: Callable[[str], None],
    note_failed: Callable[[str], None],
) -> int:
    """Train until the stop rule holds, or for `max_steps`; returns the number of steps.

    `note_failed` gets the reason for each demonstration that was left out because its session failed.
    """
    settings = stage.settings
    for step in range(1, settings.max_steps + 1):
        metrics = await policy.sft(await _next_pairs(stage, note_failed))
        if step % settings.check_every_steps == 0:
            dev = await read_dev()
            report(f"warm-up {step}/{settings.max_steps}  loss {metrics['loss']:.2f}  dev accuracy {dev.accuracy:.2f}")
            if enough(dev, settings):
                return step
    return settings.max_steps


def enough(dev: Evaluation, settings: config.Warmup) -> bool:
    """The stop rule: True if the overall accuracy and the accuracy of each named kind have reached their bounds."""
    reached = {kind: sum(values) / len(values) for kind, values in dev.accuracies.items()}
    return dev.accuracy >= settings.stop_accuracy and all(
        reached.get(kind, 0.0) >= wanted for kind, wanted in settings.stop_kind_accuracy.items()
    )


async def _next_pairs(stage: WarmupStage, note_failed: Callable[[str], None]) -> list[SftExample]:
    rows = stage.source.take(stage.order, stage.settings.batch_size)
    pairs, failed = list[SftExample](), list[str]()
    for row in rows:
        try:
            pairs += await _pairs_of(stage, row)
        except FailedEpisodeError as error:
            failed.append(f"a demonstration: {error}")
            note_failed(failed[-1])
    if failed and not pairs:
        raise TrainError(
            f"all {len(failed)} demonstrations of a warm-up step failed; the last error: {failed[-1]}; correct the "
            "environment, or set warmup=null"
        )
    return pairs


async def _pairs_of(stage: WarmupStage, row: PromptedTask) -> list[SftExample]:
    """Pairs of prompt and answer, one per turn of the demonstration; each prompt is the conversation so far."""
    answers = stage.environment.demonstration(row.task)
    if len(answers) == 1:
        return [_pair(stage, row, row.prompt, answers[0])]
    session = await stage.environment.open(row.task, SESSION_SEED)
    try:
        return [pair async for pair in _demonstrated(stage, row, answers, session)]
    finally:
        await session.close()


async def _demonstrated(
    stage: WarmupStage, row: PromptedTask, answers: Sequence[str], session: Session
) -> AsyncIterator[SftExample]:
    environment, prompt = stage.environment, row.prompt
    asked, turns = tuple(environment.prompt(row.task)), list[Turn]()
    for text in answers:
        pair = _pair(stage, row, prompt, text)
        yield pair
        turns.append(Turn(messages=asked, text=text))
        messages = await session.reply(turns) if len(turns) < environment.turns_of(row.task) else None
        if messages is None:
            return
        asked = tuple(messages)
        try:
            observation = stage.source.renderer.observation(asked, after=pair.answer_ids[-1], where=_where(row))
        except DataError as error:
            raise unreadable(session, error) from error
        prompt = extended(prompt, np.asarray(pair.answer_ids, dtype=np.int64), observation)


def _pair(stage: WarmupStage, row: PromptedTask, prompt: Prompt, text: str) -> SftExample:
    return SftExample(prompt=prompt, answer_ids=stage.answer_ids(prompt, text, _where(row)))


def _where(row: PromptedTask) -> str:
    return f"a demonstration of {row.task.id}"
