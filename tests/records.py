"""Records of the simplest kind, for tests that are about something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fovea.evaluation.records import RecordedEpisode, RecordedTurn
from fovea.types import Completion, Episode, Prompt, Sample, SampledTurn, TurnTokens
from fovea_gym.types import FinishReason, Score, Task


def text_prompt(token_ids: Sequence[int] | np.ndarray) -> Prompt:
    ids = np.asarray(token_ids, dtype=np.int64)
    return Prompt(token_ids_L=ids, unexpanded_ids_U=ids)


PROMPT = text_prompt(range(3))


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def completion_of(token_ids: Sequence[int] | np.ndarray, **fields: Any) -> Completion:
    """A completion of these tokens, with log-probs of 0."""
    logprobs_T = np.zeros(len(token_ids), dtype=np.float32)
    given: dict[str, Any] = {"logprobs_T": logprobs_T, "text": "", "finish": "stop", "version": 0}
    return Completion(token_ids_T=np.asarray(token_ids), **given | fields)


def sample_of(token_ids: Sequence[int] | np.ndarray, **fields: Any) -> Sample:
    """A sample of these tokens, all of them actions, with rollout log-probs of 0."""
    given: dict[str, Any] = {"mask_T": all_actions(len(token_ids)), "reward": 0.0, "weight": 1.0}
    given["rollout_logprobs_T"] = np.zeros(len(token_ids), dtype=np.float32)
    return Sample(token_ids_T=np.asarray(token_ids), **given | fields)


def one_turn(task: Task, completion: Completion, score: Score) -> Episode:
    """An episode of one turn; the prompt is a token."""
    tokens = TurnTokens(observation=text_prompt([0]), completion=completion)
    turn = SampledTurn(messages=(), text=completion.text, finish=completion.finish, tokens=tokens)
    return Episode(task=task, turns=(turn,), score=score)


def all_actions(num_tokens: int) -> np.ndarray:
    return np.ones(num_tokens, dtype=np.bool_)


def said(
    text: str, reward: float = 0.0, accuracy: float = 0.0, *, finish: FinishReason = "stop", **fields: object
) -> RecordedEpisode:
    """A recorded answer of one turn, unless `turns` are given."""
    turns = (RecordedTurn(text=text, finish=finish),)
    return RecordedEpisode(**({"turns": turns, "reward": reward, "accuracy": accuracy} | fields))  # type: ignore[arg-type]
