"""Dependence of answers on their pictures: how much likelier an answer is with the true pictures than with others.

    d = (log p(answer | true pictures) - log p(answer | other pictures)) / number of tokens, in nats

for the first turn of the model's own greedy answer. It is positive if the model takes its answer from the picture, and
near 0 if it would answer the same without it. An accuracy shows this dependence only where the answer changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from fovea.data.prompt_source import PromptSource
from fovea.evaluation.answer_logprobs import Answered
from fovea.evaluation.records import AnsweredRow

Scores: TypeAlias = Callable[[Iterable[Answered]], Iterator[float]]
"""A function that returns the log-probs of answers given their prompts."""


def dependence(
    true: PromptSource, others: Sequence[PromptSource], rows: Mapping[str, AnsweredRow], scores: Scores
) -> list[dict[str, float]]:
    """For each source in `others`, the dependence of its rows in nats per token, by task id.

    `rows` are the answers to `true`, with their tokens. Each source is scored once; its prompts are created one by one.
    """
    answers = {name: np.array(row.token_ids, dtype=np.int64) for name, row in rows.items() if row.token_ids}

    def per_token(source: PromptSource, indices: Iterable[int]) -> dict[str, float]:
        names = list[str]()

        def answered() -> Iterator[Answered]:
            for index in indices:
                item = source.get(index)
                if item is not None and item.task.id in answers:
                    names.append(item.task.id)
                    yield item.prompt, answers[item.task.id]

        found = list(scores(answered()))
        return {name: score / len(answers[name]) for name, score in zip(names, found, strict=True)}

    ids = answers.keys() & {task.id for other in others for task in other.tasks}
    of_true = per_token(true, sorted(rows[name].index for name in ids))
    changed = [per_token(other, range(len(other))) for other in others]
    return [{name: of_true[name] - score for name, score in each.items()} for each in changed]
