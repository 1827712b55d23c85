"""A scored completion as reports and evaluations keep it: text and score, without token ids or log-probs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fovea.types import Episode
from fovea_gym.types import FinishReason, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidMessage:
    """A message of an episode as text, in which [image] stands for an image (other fields as in `types.Message`)."""

    role: str
    text: str
    tool: str = ""
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswer:
    """The text of one completion and its score by the environment (fields as in `types.Score`)."""

    text: str
    reward: float
    accuracy: float
    parts: Mapping[str, float] = field(default_factory=dict)
    image_parts: tuple[Mapping[str, float], ...] = ()
    finish: FinishReason = "stop"
    turns: tuple[SaidMessage, ...] = ()
    """Every message after the prompt, in an episode of several turns; else none."""


def sampled_answer(episode: Episode) -> SampledAnswer:
    """The text and score of an episode."""
    return SampledAnswer(
        text=episode.last.text,
        reward=episode.score.reward,
        accuracy=episode.score.accuracy,
        parts=episode.score.parts,
        image_parts=episode.score.image_parts,
        finish=episode.last.finish,
        turns=_turns(episode) if len(episode.turns) > 1 else (),
    )


def turns_to_json(answer: SampledAnswer) -> dict[str, list[dict[str, str | bool]]]:
    """The turns of an answer as chat messages under the key `turns`; empty for an answer of one turn."""
    return {"turns": list(map(_message_to_json, answer.turns))} if answer.turns else {}


def _message_to_json(message: SaidMessage) -> dict[str, str | bool]:
    tool: dict[str, str | bool] = {"name": message.tool} if message.tool else {}
    return {"role": message.role, "content": message.text, **tool, **({"failed": True} if message.failed else {})}


def _turns(episode: Episode) -> tuple[SaidMessage, ...]:
    first, *later = episode.turns
    said = [SaidMessage(role="assistant", text=first.text)]
    for turn in later:
        said += map(_said, turn.messages)
        said.append(SaidMessage(role="assistant", text=turn.text))
    return tuple(said)


def _said(message: Message) -> SaidMessage:
    text = " ".join(part if isinstance(part, str) else "[image]" for part in message.parts)
    return SaidMessage(role=message.role, text=text, tool=message.tool, failed=message.failed)
