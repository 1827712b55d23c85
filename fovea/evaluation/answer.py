"""One completion with its score, as reports and evaluations keep it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fovea.types import Episode, FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswer:
    """One completion and what the environment said of it."""

    text: str
    reward: float
    accuracy: float
    parts: Mapping[str, float] = field(default_factory=dict)
    image_parts: tuple[Mapping[str, float], ...] = ()
    finish: FinishReason = "stop"


def sampled_answer(episode: Episode) -> SampledAnswer:
    """What is kept of an episode."""
    return SampledAnswer(
        text=episode.completion.text,
        reward=episode.score.reward,
        accuracy=episode.score.accuracy,
        parts=episode.score.parts,
        image_parts=episode.score.image_parts,
        finish=episode.completion.finish,
    )
