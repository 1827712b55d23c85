"""Records of episodes without arrays: training samples, held-out answers, `fovea eval --json` and the page use them.

Axes: `T` tokens of an answer, of which the first `RECORDED_TOKENS` (`run.recorded`) are stored.
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
"""Pattern of image names. It excludes paths, since a run folder may come from an untrusted source."""
ImageName: TypeAlias = Annotated[str, StringConstraints(pattern=f"^{IMAGE_NAME}$")]
_NumberOrNone: TypeAlias = Annotated[
    float | None,
    PlainSerializer(lambda value: None if value is None else json_number(value), float | None, when_used="json"),
]
IMAGE_TEXT = "[image]"
"""Placeholder for an image of a message in records that do not store images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedImage:
    """An image of the run folder, and the coordinate frame of the model's boxes and points on it."""

    name: ImageName
    """Name of the image's file in samples/images, without the suffix."""
    frame: tuple[PositiveInt, PositiveInt] | None = None
    """Width and height of the frame of boxes and points in answers (`ModelFamily.box_frame`); None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedMessage:
    """One chat message, with text and images in the order in which the model reads them."""

    role: str
    parts: tuple[str | RecordedImage, ...]
    tool: str = ""
    """Name of the tool, if the message is the result of a tool call."""
    failed: bool = False
    """True if the message reports that a tool call was malformed or failed."""

    @property
    def images(self) -> tuple[RecordedImage, ...]:
        return tuple(part for part in self.parts if isinstance(part, RecordedImage))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTrace:
    """Per-token values of the first tokens of an answer; a value that was not computed is empty."""

    pieces: tuple[str, ...]
    """The text of each token [T]."""
    engine_logprobs: tuple[Number, ...]
    """Log-probs [T] from the engine that sampled the tokens, at the sampling temperature."""
    trainer_logprobs: tuple[Number, ...] = ()
    """Log-probs [T] from the trainer before the update."""
    advantages: tuple[Number, ...] = ()
    """Advantages [T]; empty for a group that was not trained on."""

    def __post_init__(self) -> None:
        lengths = [len(values) for values in (self.engine_logprobs, self.trainer_logprobs, self.advantages)]
        if any(length not in (0, len(self.pieces)) for length in lengths):
            engine, trainer, advantages = lengths
            raise ValueError(
                f"{len(self.pieces)} tokens have {engine} engine log-probs, {trainer} trainer log-probs and "
                f"{advantages} advantages"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """The model's answer, and the messages that the environment added before it (none before the first turn)."""

    messages: tuple[RecordedMessage, ...] = ()
    text: str
    finish: FinishReason = "stop"
    tokens: TokenTrace | None = None
    """Per-token values; recorded for training samples only."""
    version: int | None = None
    """Version of the weights that sampled it, as the number of their weight sync; None for held-out answers."""
    reward: _NumberOrNone = None
    """The turn's part of the reward; None if only the whole episode has a reward."""
    seconds: Number = 0.0
    """Seconds that the environment took to produce the messages."""

    @property
    def images(self) -> tuple[RecordedImage, ...]:
        return tuple(image for message in self.messages for image in message.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEpisode:
    """One answer to a task: its turns and the environment's score, whose fields are those of `types.Score`."""

    turns: Annotated[tuple[RecordedTurn, ...], Field(min_length=1)]
    reward: Number
    accuracy: Number
    parts: Mapping[str, Number] = field(default_factory=dict)
    image_parts: tuple[Mapping[str, Number], ...] = ()
    marks: tuple[Mark, ...] = ()
    """Boxes and points that the reward function returned."""
    end: EpisodeEnd = "done"

    @property
    def text(self) -> str:
        """The text of the model's last turn."""
        return self.turns[-1].text

    @property
    def was_truncated(self) -> bool:
        """True if the last turn reached its token limit, or the episode reached one of its limits."""
        return self.turns[-1].finish == "length" or self.end != "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """One task of a split, with the facts that are the same for every model."""

    id: str
    index: int = -1
    """Index of the row in its split; -1 if it is not known."""
    kind: str
    question: str = ""
    truth: str = ""
    """The gold answer."""
    image_type: str | None = None
    """The row's value of `evaluate.image_type_key`; None if that is not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRow(TaskRow):
    """A task with its answers: a group of a training step, or a held-out row."""

    messages: tuple[RecordedMessage, ...] = ()
    """The prompt as the model read it, for training samples; for held-out rows on the page only their pictures."""
    answers: Annotated[tuple[RecordedEpisode, ...], Field(min_length=1)]
    token_ids: Annotated[tuple[int, ...], Field(exclude=True)] = ()
    """Token ids of the first answer's first turn, for an evaluation only; empty for a server or a baseline."""

    @property
    def images(self) -> tuple[RecordedImage, ...]:
        return tuple(image for message in self.messages for image in message.images)


ANSWERED_ROW = TypeAdapter(AnsweredRow)


def recorded_episode(episode: Episode) -> RecordedEpisode:
    """The texts and the score of an episode, without prompt, images, tokens and times: equal for equal runs."""
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
