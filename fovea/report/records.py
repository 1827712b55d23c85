"""Sample records: what a run keeps of one group of a step, for the report and for `fovea view`.

Axes: `T` tokens of an answer, of which the first `RECORDED_TOKENS` (`run.recorded`) are kept.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from fovea.evaluation.answer import SampledAnswer
from fovea.types import EpisodeEnd
from fovea_gym.types import FinishReason, Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedImage:
    """An image of the run folder, and the frame of coordinates in which the model speaks about it."""

    name: str
    """Name of its file in samples/images, without the suffix."""
    frame: tuple[int, int] | None = None
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
    engine_logprobs: tuple[float, ...]
    """Log-probs [T] of the engine that drew them, at the sampling temperature."""
    trainer_logprobs: tuple[float, ...] = ()
    """Log-probs [T] of the trainer before the update."""
    advantages: tuple[float, ...] = ()
    """Advantages [T]; empty in a group that took no part in the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """The model's answer, and the messages that the environment had added before it (none in the first turn)."""

    messages: tuple[RecordedMessage, ...] = ()
    text: str
    finish: FinishReason = "stop"
    tokens: TokenTrace | None = None
    version: int | None = None
    """Version of the weights that drew it, the number of their push; None in records of versions that kept none."""
    reward: float | None = None
    """Its part of the reward; None where the reward is that of the whole episode."""
    seconds: float = 0.0
    """Seconds that the environment took for the messages."""

    @property
    def images(self) -> tuple[RecordedImage, ...]:
        return tuple(image for message in self.messages for image in message.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """One episode of a group: its score and its turns."""

    score: SampledAnswer
    """The text of the last turn with its score."""
    turns: tuple[RecordedTurn, ...] = ()
    """All turns; empty in records of versions that kept the last text only."""
    marks: tuple[Mark, ...] = ()
    """Boxes and points that the reward gave."""
    end: EpisodeEnd = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """One task with the answers of its group."""

    id: str = ""
    """Id of the task; empty in records of versions that kept none."""
    prompt: str
    """The question."""
    truth: str
    kind: str
    messages: tuple[RecordedMessage, ...]
    """The prompt as the model read it."""
    answers: tuple[RecordedAnswer, ...]

    @property
    def images(self) -> tuple[RecordedImage, ...]:
        return tuple(image for message in self.messages for image in message.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """Fields of a record that filters and lists need, without reading the record."""

    kind: str
    row: str
    """Hash of question, truth and images: equal for the same row in another step or another run."""
    rewards: tuple[float, ...] = field(default=())
    """Reward of each answer."""
    num_truncated: int = 0


def summary_of(record: SampleRecord) -> GroupSummary:
    """The summary of a record."""
    scores = [answer.score for answer in record.answers]
    return GroupSummary(
        kind=record.kind,
        row=_row(record),
        rewards=tuple(score.reward for score in scores),
        num_truncated=sum(answer.score.finish == "length" or answer.end != "done" for answer in record.answers),
    )


def _row(record: SampleRecord) -> str:
    # a data set may hold lone surrogates, which UTF-8 cannot encode
    words = [record.prompt, record.truth, *(image.name for image in record.images)]
    return hashlib.sha256("\0".join(words).encode("utf-8", errors="surrogatepass")).hexdigest()[:12]
