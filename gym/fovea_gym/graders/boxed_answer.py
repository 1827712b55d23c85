"""The grade of `geo3k`: compares the final answer of a response, in a box or in tags, with the true answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from fovea_gym.environments.dataset_prompts import plain_answer
from fovea_gym.graders.base import Grade, shown
from fovea_gym.graders.math_answer import last_boxed, same_answer

FindsAnswer: TypeAlias = Callable[[str], str | None]
"""A function that returns the final answer of a response, or None if the response has none in the required form."""


def gold_answers(cell: object, where: str) -> list[str]:
    """The true answers in a cell: one answer or a list of them, which may be in verl's `ground_truth`."""
    if isinstance(cell, Mapping):
        cell = cell.get("ground_truth")
    several = cell if isinstance(cell, list | tuple) and cell else [cell]
    return [plain_answer(one, where) for one in several]


def grade(
    prediction: str, truth: str | Sequence[str], *, find: FindsAnswer = last_boxed, think_tags: bool = False
) -> Grade:
    """Grade the last closed box of a response: right if it equals any of the true answers.

    The part `format` is 1 if the answer has the required form; with `think_tags` it must follow `</think>`. The opening
    `<think>` may be missing, since many chat templates write it into the prompt.
    """
    truths = [truth] if isinstance(truth, str) else truth
    given = find(prediction)
    accuracy = float(given is not None and any(same_answer(given, one) for one in truths))
    formatted = float(given is not None and (not think_tags or _found_after_thinking(prediction, find)))
    kind, missing = ("boxed", r"\boxed{}") if find is last_boxed else ("tagged", "<answer>")
    if given is None:
        reason = f"no {missing} that closes"
    else:
        reason = f"{kind} {shown(given)} {'equals' if accuracy else 'is not'} {' or '.join(map(shown, truths))}"
    return Grade(score=accuracy, parts={"answer": accuracy, "format": formatted}, reason=reason)


def is_gradable(truths: Sequence[str]) -> bool:
    """True if each true answer, boxed literally, would be graded right; false for `{5` and a bare `$`."""
    return all(grade(rf"\boxed{{{truth}}}", truth).score == 1 for truth in truths)


def _found_after_thinking(text: str, find: FindsAnswer) -> bool:
    """True if an answer follows exactly one block of reasoning in tags."""
    thought, closing, tail = text.partition("</think>")
    thought = re.sub(r"^\s*<think>", "", thought)
    well_formed = closing and thought.strip() and not re.search("</?think>", thought + tail)
    return bool(well_formed) and find(tail) is not None
