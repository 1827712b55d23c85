"""A scored completion as reports and evaluations keep it: text and score, without token ids or log-probs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fovea.types import Episode, FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswer:
    """The text of one completion and its score by the environment (fields as in `types.Score`)."""

    text: str
    reward: float
    accuracy: float
    parts: Mapping[str, float] = field(default_factory=dict)
    image_parts: tuple[Mapping[str, float], ...] = ()
    finish: FinishReason = "stop"


def sampled_answer(episode: Episode) -> SampledAnswer:
    """The text and score of an episode."""
    return SampledAnswer(
        text=episode.last.text,
        reward=episode.score.reward,
        accuracy=episode.score.accuracy,
        parts=episode.score.parts,
        image_parts=episode.score.image_parts,
        finish=episode.last.finish,
    )
