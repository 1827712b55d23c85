r"""Short answers to questions about images: found in a response, read as one claim, compared with the truth.

The metric is that of VQA (Antol et al., arXiv 1505.00468; averaged over annotators as in Goyal et al.,
arXiv 1612.00837). An answer counts for one value: `vqa_claim` reads it without the truth, and what it claims is then
compared with the truth in the normal form of `vqa_words`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from fovea.environments.graders.math_answer import last_boxed
from fovea.environments.graders.vqa_claim import claim_of
from fovea.environments.graders.vqa_words import same_words, spelled

_ENOUGH_AGREE = 3

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_LABEL = re.compile(r"\banswer\b\**\s*(?:is\b|:)[\s:*]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?;\n]")
_DENIAL = re.compile(
    r"\b(?:not|never|cannot|wrong|incorrect|false|if|unless|doubt|neither|nor|no(?=\W*(?:\w+\W*)?$))\b|n\Wt\b",
    re.IGNORECASE,
)
_FONT = re.compile(r"\\(?:text[a-z]*|math[a-z]+|mbox|operatorname) ?\{([^{}]*)\}")


def found_answer(response: str) -> str:
    r"""The answer in a response, from the most to the least explicit.

    The last closed `\boxed{...}`; the last `<answer>...</answer>`; the text after the last "answer:" or
    "answer is", up to the end of its line, unless its sentence denies it; else the text after `</think>`.
    """
    boxed = last_boxed(response)
    marked = _last_marked(response) if boxed is None else boxed
    tail = response.rpartition("</think>")[2].strip() if marked is None else marked
    labelled = _labelled(tail) if marked is None else None
    return _FONT.sub(r"\1", tail if labelled is None else labelled)


def _labelled(text: str) -> str | None:
    """The text after its last label; None without one, or after `I doubt that the answer is`."""
    labels = list(_LABEL.finditer(text))
    if not labels:
        return None
    sentence = _SENTENCE_END.split(text[: labels[-1].start()])[-1]
    return None if _DENIAL.search(sentence) else text[labels[-1].end() :].split("\n", maxsplit=1)[0]


def _last_marked(response: str) -> str | None:
    """The text in the last pair of tags. Linear time."""
    tags = list(_TAG.finditer(response))
    pairs = [(opening, closing) for opening, closing in itertools.pairwise(tags) if closing[1] > opening[1]]
    return response[pairs[-1][0].end() : pairs[-1][1].start()] if pairs else None


def same_short_answer(given: str, truth: str) -> bool:
    """Whether a found answer is the true one: in the same words, or as what it claims."""
    return _is_true(_claimed(given), truth)


def soft_accuracy(given: str, truths: Sequence[str]) -> float:
    """VQA's accuracy: min(annotators who agree / 3, 1), averaged over all subsets that leave one annotator out.

    With fewer than four annotators all others have to agree; a single annotator's answer is the truth.
    """
    claimed = _claimed(given)
    agree = [_is_true(claimed, truth) for truth in truths]
    if len(agree) < 2:
        return float(any(agree))
    enough = min(_ENOUGH_AGREE, len(agree) - 1)
    left = [min((sum(agree) - one) / enough, 1.0) for one in agree]
    return sum(left) / len(left)


def _claimed(given: str) -> tuple[str, ...]:
    """The one value of an answer, in its whole words and in those of its claim."""
    claim = claim_of(given)
    return (spelled(given), claim.phrase, claim.number or "")


def _is_true(claimed: Sequence[str], truth: str) -> bool:
    true = spelled(truth)
    return any(same_words(words, true) for words in claimed)
