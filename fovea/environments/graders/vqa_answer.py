r"""Short answers to questions about images: found in a response, normalised, compared.

The metric is that of VQA (Antol et al., arXiv 1505.00468; averaged over annotators as in Goyal et al.,
arXiv 1612.00837). The spelling follows its evaluation code in its intent (case, articles, number
words, punctuation, contractions), and departs from it where it errs: number words beyond ten are numbers,
`-3` is not 3, `1,000` is 1000 and `1.000` is not, any apostrophe goes, and a choice `A` is no article.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence

from fovea.environments.graders.math_answer import last_boxed

MAX_CHARS = 2000
"""The length to which an answer is cut; a longer one is wrong unless it is marked as the answer."""
MAX_SENTENCE_WORDS = 20
"""The longest sentence that is searched for an answer; a longer one has to mark it."""
_ENOUGH_AGREE = 3

_TEENS = ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", *_TEENS]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_NUMBER_WORDS = {word: n for n, word in enumerate(_ONES)} | {word: 10 * n for n, word in enumerate(_TENS, start=2)}
_ARTICLES = {"a", "an", "the"}
_SPELLINGS = {"grey": "gray", "colour": "color", "colours": "colors", "coloured": "colored", "centre": "center"}

_YES = {"yes", "yeah", "yep", "yup", "true", "correct"}
_BOTH = {"and", "or", "maybe"}
_NO = {"no", "nope", "nah", "false", "incorrect"}

_APOSTROPHES = re.compile(
    "['`\N{RIGHT SINGLE QUOTATION MARK}\N{LEFT SINGLE QUOTATION MARK}\N{MODIFIER LETTER APOSTROPHE}\N{ACUTE ACCENT}]"
)
_PUNCTUATION = re.compile(r"[\"“”„«»()\[\]{}<>=+\\_@`!?;*#|~^]|…")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?%?")
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_LABEL = re.compile(r"\banswer\b\**\s*(?:is\b|:)[\s:*]*", re.IGNORECASE)
_COPULA = re.compile(r"^(?:\w+ ){1,12}?(?:is|are|was|were|looks|appears|seems) (?:to be )?(.+)$|^(?:its|thats) (.+)$")
_HEDGE = re.compile(
    r"\b(?:or|between|not|nt|isnt|arent|at least|at most|more|less|fewer|over|under|about|around|approximately|almost"
    r"|nearly|roughly|minus|negative|maybe|perhaps|possibly|either|to"
    # of another size than the number that stands beside it
    r"|hundreds?|thousands?|millions?|billions?|trillions?|dozens?|half)\b"
)
_TWICE = re.compile(r"\W*(\w+) ?\((\w+)\)\W*")


def found_answer(response: str) -> str:
    r"""The answer in a response, from the most to the least explicit.

    The last closed `\boxed{...}`; the last `<answer>...</answer>`; the text after the last "answer:" or
    "answer is", up to the end of its line; else the text after `</think>`.
    """
    boxed = last_boxed(response)
    if boxed is not None:
        return re.sub(r"\\text ?\{([^{}]*)\}", r"\1", boxed)
    marked = _last_marked(response)
    if marked is not None:
        return marked
    tail = response.rpartition("</think>")[2].strip()
    labels = list(_LABEL.finditer(tail))
    if labels:
        return tail[labels[-1].end() :].split("\n")[0]
    return tail


def _last_marked(response: str) -> str | None:
    """The text in the last pair of tags. Linear time."""
    tags = list(_TAG.finditer(response))
    pairs = [(opening, closing) for opening, closing in itertools.pairwise(tags) if closing[1] > opening[1]]
    return response[pairs[-1][0].end() : pairs[-1][1].start()] if pairs else None


def spelled(answer: str) -> str:
    """A short answer in normal form."""
    text = unicodedata.normalize("NFKC", answer[:MAX_CHARS]).casefold()
    text = "".join(_plain_digit(char) for char in text)
    text = _APOSTROPHES.sub("", text)  # every contraction: "don't" and "dont"
    text = re.sub("[\N{MINUS SIGN}\N{EN DASH}\N{EM DASH}\N{HYPHEN}\N{NON-BREAKING HYPHEN}]", "-", text)
    text = re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda match: match.group().replace(",", ""), text)
    text = re.sub(r"(?<!\d)\.(?=\d)", "0.", text) if re.match(r"\s*-?\.\d", text) else text
    text = re.sub(r"\.(?!\d)|(?<!\d)\.", "", text)  # not a decimal point
    text = re.sub(r"[,:](?!\d)|(?<!\d)[,:]|,|/", " ", text)
    text = re.sub(r"^\s*\$([^$]+)\$\s*$", r"\1", text)
    text = _PUNCTUATION.sub(" ", text)
    text = re.sub(rf"(?<!\S)-(?=(?:{'|'.join(_NUMBER_WORDS)})\b)", "minus ", text)
    text = re.sub(r"(?<!\S)-(?!\d)|(?<=\s)-(?=\s)|-(?!\S)", " ", text)
    words = _with_numbers([_SPELLINGS.get(word, word) for word in _split_number_words(text).split()])
    text = " ".join(_without_articles(words) or words)
    text = re.sub(r"(?<!\S)(?:minus|negative) (?=\d)", "-", text)
    return re.sub(r"(?<=\d) (?:%|percent|per cent)(?!\S)", "%", text)


def same_short_answer(given: str, truth: str) -> bool:
    """Whether a found answer is the true one, in the same words or in a sentence that says nothing else."""
    one, other = spelled(_said_once(given)), spelled(truth)
    if not one or not other:
        return False
    if _equal(one, other):
        return True
    if len(one.split()) > MAX_SENTENCE_WORDS:
        return False
    if other in ("yes", "no"):
        return yes_or_no(one) == other
    if _NUMBER.fullmatch(other):
        return _equal(_only_number(one), other)
    said = _COPULA.match(one)
    return said is not None and _equal(" ".join(_without_articles((said[1] or said[2]).split())), other)


def soft_accuracy(given: str, truths: Sequence[str]) -> float:
    """VQA's accuracy: min(annotators who agree / 3, 1), averaged over all subsets that leave one annotator out.

    With fewer than four annotators all others have to agree; a single annotator's answer is the truth.
    """
    agree = [same_short_answer(given, truth) for truth in truths]
    if len(agree) < 2:
        return float(any(agree))
    enough = min(_ENOUGH_AGREE, len(agree) - 1)
    left = [min((sum(agree) - one) / enough, 1.0) for one in agree]
    return sum(left) / len(left)


def yes_or_no(spelled_answer: str) -> str | None:
    """The yes or no of a normalised answer; None where it says neither or both.

    It is in the first word, or the last one of "the statement is true".
    """
    first, *others = spelled_answer.split()
    if first in _YES:
        return None if others and others[0] in _BOTH | _NO else "yes"
    if first in _NO:
        return None if others and (others[0] in _BOTH | _YES or "yes" in others) else "no"
    verdict = re.fullmatch(r"(?:[\w-]+ ){0,11}(?:is|its|are) (\w+)", spelled_answer)
    if verdict is None or re.search(r"\b(?:not|isnt|arent|neither)\b", spelled_answer):
        return None
    return "yes" if verdict[1] in _YES else "no" if verdict[1] in _NO else None


def _equal(one: str, other: str) -> bool:
    if _NUMBER.fullmatch(one) and _NUMBER.fullmatch(other):
        return one.endswith("%") == other.endswith("%") and float(one.rstrip("%")) == float(other.rstrip("%"))
    return bool(_hyphen_forms(one) & _hyphen_forms(other))


def _hyphen_forms(text: str) -> set[str]:
    """The forms of a hyphenated word: `t-shirt` equals `tshirt` and `t shirt`, which do not equal each other."""
    return {text, re.sub(r"(?<=[^\W\d])-(?=\w)", "", text), re.sub(r"(?<=[^\W\d])-(?=\w)", " ", text)} - {""}


def _without_articles(words: Sequence[str]) -> list[str]:
    """The words without articles; `a` is none where no noun follows: in `plan A`, and in `A, B`, which picks two."""
    following = [*words, ""][1:]
    return [
        word
        for word, after in zip(words, following, strict=True)
        if word not in _ARTICLES or (word == "a" and (not after or (len(after) == 1 and after.isalpha())))
    ]


def _said_once(answer: str) -> str:
    """An answer without its repetition in parentheses: `Three (3)` says three."""
    twice = _TWICE.fullmatch(answer[:MAX_CHARS])
    return twice[1] if twice is not None and spelled(twice[1]) == spelled(twice[2]) else answer


def _only_number(text: str) -> str:
    """The one number of a short sentence that does not hedge; an empty text where there is none or are several."""
    if _HEDGE.search(text):
        return ""
    numbers = [word for word in text.split() if _NUMBER.fullmatch(word)]
    if not numbers and re.search(r"^(?:there (?:are|is) )?no [a-z]", text):
        return "0"
    has_others = any(re.search(r"\d", word) and not _NUMBER.fullmatch(word) for word in text.split())
    return numbers[0] if len(numbers) == 1 and not has_others else ""


def _plain_digit(char: str) -> str:
    """A digit of any script as 0 to 9."""
    return str(unicodedata.decimal(char)) if char.isdecimal() else char


def _split_number_words(text: str) -> str:
    """A text with `twenty-one` as two words."""
    return re.sub(rf"\b({'|'.join(_TENS)})-(?=(?:{'|'.join(_ONES[1:10])})\b)", r"\1 ", text)


def _with_numbers(words: Sequence[str]) -> list[str]:
    """The words with numbers as digits: `twenty one` is 21, `none` is 0; `two three` stays two numbers."""
    numbers: list[str] = []
    can_add = False
    for word in words:
        value = _NUMBER_WORDS.get(word)
        if can_add and value is not None and 0 < value < 10:
            numbers[-1] = str(int(numbers[-1]) + value)
            can_add = False
            continue
        can_add = word in _TENS
        numbers.append("0" if word == "none" else word if value is None else str(value))
    return numbers
