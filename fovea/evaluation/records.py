"""The record of an episode without its arrays, for samples of training, held-out answers, `fovea eval` and the page.

Axes: `T` tokens of an answer, of which the first `RECORDED_TOKENS` (`run.recorded`) are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from pydantic import Field, PlainSerializer, PositiveInt, StringConstraints, TypeAdapter

from fovea.types import Episode, EpisodeEnd
from fovea_gym.types import FinishReason, Mark
from fovea_gym.utils.files import json_number
from fovea_gym.utils.stored import Number

IMAGE_NAME = r"[0-9a-f]{16}"
"""A name of an image that leads nowhere else: a run folder may come from someone else."""
ImageName: TypeAlias = Annotated[str, StringConstraints(pattern=f"^{IMAGE_NAME}$")]
_NumberOrNone: TypeAlias = Annotated[
    float | None,
    PlainSerializer(lambda value: None if value is None else json_number(value), float | None, when_used="json"),
]
IMAGE_TEXT = "[image]"
"""Stands for an image of a message where images are not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedImage:
    """An image of the run folder, and the frame of coordinates in which the model speaks about it."""

    name: ImageName
    """Name of its file in samples/images, without the suffix."""
    frame: tuple[PositiveInt, PositiveInt] | None = None
    """Width and height in which an answer gives boxes and points (`ModelFamily.box_frame`); None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedMessage:
    """One chat message; text and images in the order in which the model reads them."""

    role: str
    parts: tuple[str | RecordedImage, ...]
    tool: str = ""
    """Name of the tool whose result it is."""
    failed: bool = False
    """True if it says that a tool call was malformed or has failed."""

    @property
    def images(self) -> tuple[RecordedImage, ...]:
        return tuple(part for part in self.parts if isinstance(part, RecordedImage))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTrace:
    """Per-token values of the first tokens of an answer; empty where a value was not computed."""

    pieces: tuple[str, ...]
    """Text of each token [T]."""
    engine_logprobs: tuple[Number, ...]
    """Log-probs [T] of the engine that drew them, at the sampling temperature."""
    trainer_logprobs: tuple[Number, ...] = ()
    """Log-probs [T] of the trainer before the update."""
    advantages: tuple[Number, ...] = ()
    """Advantages [T]; empty in a group that took no part in the update."""

    def __post_init__(self) -> None:
        lengths = [len(values) for values in (self.engine_logprobs, self.trainer_logprobs, self.advantages)]
        if any(length not in (0, len(self.pieces)) for length in lengths):
            engine, trainer, advantages = lengths
            raise ValueError(f"values of {engine}, {trainer} and {advantages} tokens for {len(self.pieces)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """The model's answer, and the messages that the environment had added before it (none in the first turn)."""

    messages: tuple[RecordedMessage, ...] = ()
    text: str
    finish: FinishReason = "stop"
    tokens: TokenTrace | None = None
    """Kept of samples of training only."""
    version: int | None = None
    """Version of the weights that drew it, the number of their sync; None of held-out answers."""
    reward: _NumberOrNone = None
    """Its part of the reward; None where the reward is that of the whole episode."""
    seconds: Number = 0.0
    """Seconds that the environment took for the messages."""

    @property
    def images(self) -> tuple[RecordedImage, ...]:
        return tuple(image for message in self.messages for image in message.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEpisode:
    """One answer to a task: its turns and its score by the environment (fields as in `types.Score`)."""

    turns: Annotated[tuple[RecordedTurn, ...], Field(min_length=1)]
    reward: Number
    accuracy: Number
    parts: Mapping[str, Number] = field(default_factory=dict)
    image_parts: tuple[Mapping[str, Number], ...] = ()
    marks: tuple[Mark, ...] = ()
    """Boxes and points that the reward gave."""
    end: EpisodeEnd = "done"

    @property
    def text(self) -> str:
        """The text of the last turn."""
        return self.turns[-1].text

    @property
    def was_truncated(self) -> bool:
        """True if the last turn reached its limit of tokens, or the episode one of its limits."""
        return self.turns[-1].finish == "length" or self.end != "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """One task of a split: the facts that are the same for every model."""

    id: str
    index: int = -1
    """Position in its split; -1 where it is not known."""
    kind: str
    question: str = ""
    truth: str = ""
    """The gold answer."""
    image_type: str | None = None
    """The row's value of `evaluate.image_type_key`; None where that is not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRow(TaskRow):
    """One task with the answers to it: a group of a step of training, or a held-out row."""

    messages: tuple[RecordedMessage, ...] = ()
    """The prompt as the model read it, of samples of training; on the page of held-out rows their pictures."""
    answers: Annotated[tuple[RecordedEpisode, ...], Field(min_length=1)]
    token_ids: Annotated[tuple[int, ...], Field(exclude=True)] = ()
    """Of the first turn of the first answer, while it is evaluated; empty of a server or a baseline."""

    @property
    def images(self) -> tuple[RecordedImage, ...]:
        return tuple(image for message in self.messages for image in message.images)


ANSWERED_ROW = TypeAdapter(AnsweredRow)


def recorded_episode(episode: Episode) -> RecordedEpisode:
    """The texts and the score of an episode, without images, tokens, times and the prompt: equal for equal runs."""
    score = episode.score
    return RecordedEpisode(
        turns=tuple(
            RecordedTurn(
                # the messages of the first turn are the prompt, which all answers share
                messages=tuple(
                    RecordedMessage(
                        role=message.role,
                        parts=tuple(part if isinstance(part, str) else IMAGE_TEXT for part in message.parts),
                        tool=message.tool,
                        failed=message.failed,
                    )
                    for message in (turn.messages if number else ())
                ),
                text=turn.text,
                finish=turn.finish,
                reward=score.turns[number] if score.turns else None,
            )
            for number, turn in enumerate(episode.turns)
        ),
        reward=score.reward,
        accuracy=score.accuracy,
        parts=score.parts,
        image_parts=score.image_parts,
        marks=tuple(mark for mark in score.marks if all(map(math.isfinite, mark.xy))),
        end=episode.end,
    )
