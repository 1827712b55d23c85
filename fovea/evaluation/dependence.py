"""Dependence of answers on their pictures: how much likelier an answer's tokens are with the true pictures.

    d = (log p(answer | true pictures) - log p(answer | other pictures)) / number of tokens, in nats

of the model's own greedy answer, or the first turn of it. Positive where the model reads its answer off the picture,
near 0 where it would say the same without: an accuracy shows that only where an answer changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import numpy as np

from fovea.environments.prompt_source import PromptedTask, PromptSource
from fovea.evaluation.answer_logprobs import Answered
from fovea.evaluation.evaluator import AnsweredRow

Scores: TypeAlias = Callable[[Iterable[Answered]], Iterator[float]]
"""Log-probs of answers after prompts."""


def dependence(
    true: PromptSource, other: PromptSource, rows: Mapping[str, AnsweredRow], scores: Scores
) -> dict[str, float]:
    """Nats per token of each row of `other`, by task id; `rows` are the answers to `true`, with their tokens."""
    answers = {name: np.array(row.token_ids, dtype=np.int64) for name, row in rows.items() if row.token_ids}
    shared = [item for item in _items(other) if item.task.id in answers]
    of_other = scores((item.prompt, answers[item.task.id]) for item in shared)
    of_true = scores((_item(true, rows[item.task.id]).prompt, answers[item.task.id]) for item in shared)
    pairs = zip(shared, of_true, of_other, strict=True)
    return {item.task.id: (whole - changed) / len(answers[item.task.id]) for item, whole, changed in pairs}


def _items(source: PromptSource) -> Iterator[PromptedTask]:
    found = (source.get(index) for index in range(len(source)))
    return (item for item in found if item is not None)


def _item(source: PromptSource, row: AnsweredRow) -> PromptedTask:
    item = source.get(row.index)
    assert item is not None, f"{row.id} was answered"
    return item
