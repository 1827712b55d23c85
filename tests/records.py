"""Records of the simplest kind, for tests that are about something else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fovea.evaluation.records import RecordedEpisode, RecordedTurn
from fovea.types import Completion, Episode, Prompt, SampledTurn, TurnTokens
from fovea_gym.types import FinishReason, Score, Task


def text_prompt(token_ids: Sequence[int]) -> Prompt:
    ids = np.asarray(token_ids, dtype=np.int64)
    return Prompt(token_ids_L=ids, unexpanded_ids_U=ids)


def one_turn(task: Task, completion: Completion, score: Score) -> Episode:
    """An episode of one turn; the prompt is a token."""
    turn = SampledTurn(
        messages=(),
        text=completion.text,
        finish=completion.finish,
        tokens=TurnTokens(observation=text_prompt([0]), completion=completion),
    )
    return Episode(task=task, turns=(turn,), score=score)


def all_actions(num_tokens: int) -> np.ndarray:
    return np.ones(num_tokens, dtype=np.bool_)


def said(
    text: str, reward: float = 0.0, accuracy: float = 0.0, *, finish: FinishReason = "stop", **fields: object
) -> RecordedEpisode:
    """A recorded answer of one turn, unless `turns` are given."""
    turns = (RecordedTurn(text=text, finish=finish),)
    return RecordedEpisode(**({"turns": turns, "reward": reward, "accuracy": accuracy} | fields))  # type: ignore[arg-type]
