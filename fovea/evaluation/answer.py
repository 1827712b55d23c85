"""A scored completion as reports and evaluations keep it: text and score, without token ids or log-probs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fovea.types import Episode, FinishReason, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswer:
    """The text of one completion and its score by the environment (fields as in `types.Score`)."""

    text: str
    reward: float
    accuracy: float
    parts: Mapping[str, float] = field(default_factory=dict)
    image_parts: tuple[Mapping[str, float], ...] = ()
    finish: FinishReason = "stop"
    turns: tuple[tuple[str, str], ...] = ()
    """Role and text of every message after the prompt, in an episode of several turns; else none."""


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


def turns_to_json(answer: SampledAnswer) -> dict[str, list[dict[str, str]]]:
    """The turns of an answer as chat messages under the key `turns`; empty for an answer of one turn."""
    return {"turns": [{"role": role, "content": text} for role, text in answer.turns]} if answer.turns else {}


def _turns(episode: Episode) -> tuple[tuple[str, str], ...]:
    first, *later = episode.turns
    said = [("assistant", first.text)]
    for turn in later:
        said += [(message.role, _text(message)) for message in turn.messages]
        said.append(("assistant", turn.text))
    return tuple(said)


def _text(message: Message) -> str:
    """The text of a message, in which [image] stands for an image."""
    return " ".join(part if isinstance(part, str) else "[image]" for part in message.parts)
