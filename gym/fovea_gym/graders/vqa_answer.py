"""The grade of `vqa`: compares a short answer with those of the annotators, or with the right option."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fovea_gym.environments.dataset_prompts import plain_answer
from fovea_gym.graders.base import Grade, shown
from fovea_gym.graders.vqa_claim import claim_of, found_answer, soft_accuracy
from fovea_gym.graders.vqa_words import option_letter, picked_letter


def grade(prediction: str, truth: str | Sequence[str], *, options: Sequence[str] = ()) -> Grade:
    """Grade a response by one answer or by several annotators (soft accuracy); with `options` the truth is a letter."""
    truths = [truth] if isinstance(truth, str) else list(truth)
    found = found_answer(prediction)
    claim = claim_of(found)
    if options:
        is_picked = option_letter(found) is not None
        read = picked_letter(found, options) or (None if is_picked else picked_letter(claim.phrase, options)) or ""
        accuracy = soft_accuracy(read, truths)
    else:
        accuracy, read = soft_accuracy(found, truths), claim.number or claim.phrase
    expected = shown(truths[0]) if len(set(truths)) == 1 else f"what {len(truths)} annotators say"
    verdict = "is" if accuracy == 1 else "is in part" if accuracy else "is not"
    reason = f"{shown(found)}, read as {shown(read)}, {verdict} {expected}"
    return Grade(score=accuracy, parts={"answer": accuracy}, reason=reason)


def is_gradable(truths: Sequence[str]) -> bool:
    """True if any true answer, boxed literally, would score above 0; false for `?`."""
    return any(grade(rf"\boxed{{{truth}}}", truths).score > 0 for truth in truths)


def majority_answer(cell: object, where: str) -> str:
    """The answer in a cell; of several annotators' answers, the most frequent one, or the first one in a tie."""
    if isinstance(cell, list | tuple) and cell:
        return Counter(answers_of(cell, where)).most_common(1)[0][0]
    return plain_answer(cell, where)


def answers_of(cell: Sequence[object], where: str) -> list[str]:
    """The answers of all annotators: texts, or mappings as in VQA v2, {answer, answer_id, answer_confidence}."""
    return [plain_answer(one.get("answer") if isinstance(one, Mapping) else one, where) for one in cell]
