"""The normal form in which short answers are compared.

The spelling follows the intent of VQA's evaluation code (case, articles, number words, punctuation, contractions) and
departs from it where that code errs: number words beyond ten are numbers, `-3` is not 3, `1,000` is 1000 but `1.000` is
not, every apostrophe is removed, and a choice `A` is not an article. Signs that change a number stay: `3+`, `>3`, `3²`.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import lru_cache

from fovea_gym.environments.dataset_prompts import bad_row
from fovea_gym.errors import BadRowError
from fovea_gym.graders.math_normalize import INVISIBLE

MAX_CHARS = 2000
"""Number of characters to which an answer is cut; a longer response is wrong unless it marks its answer."""
NUMBER = r"-?\d+(?:\.\d+)?%?"
"""The pattern of a number in normal form."""

_TEENS = ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", *_TEENS]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_NUMBER_WORDS = {word: n for n, word in enumerate(_ONES)} | {word: 10 * n for n, word in enumerate(_TENS, start=2)}
_TENS_AND_ONE = re.compile(rf"\b({'|'.join(_TENS)})-(?=(?:{'|'.join(_ONES[1:10])})\b)")
_SPELLINGS = {"grey": "gray", "colour": "color", "colours": "colors", "coloured": "colored", "centre": "center"}
_YES = {"yes", "yeah", "yep", "yup", "true", "correct"}
_NO = {"no", "nope", "nah", "false", "incorrect", "not true", "not correct"}

_APOSTROPHES = re.compile(
    "['`\N{RIGHT SINGLE QUOTATION MARK}\N{LEFT SINGLE QUOTATION MARK}\N{MODIFIER LETTER APOSTROPHE}\N{ACUTE ACCENT}]"
)
_DASHES = re.compile("[\N{MINUS SIGN}\N{EN DASH}\N{EM DASH}\N{HYPHEN}\N{NON-BREAKING HYPHEN}]")
# Digits that NFKC would merge into a number: it turns a 3 with a raised 2 into 32.
_RAISED = re.compile("[⁰¹²³⁴-⁹₀-₉]")
# `a` is not an article before a single letter, as in `A B`, nor before punctuation, as in `A. yes`
_ARTICLE = re.compile(r"\b(?:an|the)\b(?=[\s\"'*(\[_]+\w)|\ba\b(?=[\s\"'*(\[_]+(?:\d|\w[\w-]))")
_PUNCTUATION = re.compile(r"[\"“”„«»()\[\]{}<>=+\\_@`!?;*#|~^]|…")
_NUMBER = re.compile(NUMBER)
# Signs that would otherwise be removed as punctuation.
_SIGNS = [
    (re.compile(r"!=|≠"), " not "),
    (re.compile(r"(?<=\d)\+"), " plus "),
    (re.compile(r"(?:<|≤)=?(?=\s*-?[.\d])"), " under "),
    (re.compile(r"(?:>|≥)=?(?=\s*-?[.\d])"), " over "),
    (re.compile(r"[~≈](?=\s*-?[.\d])"), " about "),
]


@lru_cache(maxsize=1024)  # the truth is the same for every answer of a group
def spelled(answer: str) -> str:
    """A short answer in normal form."""
    return _plain(_ARTICLE.sub(" ", _folded(answer)))


def plain_words(answer: str) -> str:
    """A short answer in normal form, but with its articles, which distinguish a sentence from a list of words."""
    return _plain(_folded(answer))


def without_articles(words: str) -> str:
    """A part of the result of `plain_words`, in normal form."""
    return " ".join(_ARTICLE.sub(" ", words).split())


def same_words(one: str, other: str) -> bool:
    """True if two answers in normal form are the same number, both yes or both no, or the same words."""
    if not one or not other:
        return False
    if _NUMBER.fullmatch(one) and _NUMBER.fullmatch(other):
        # not as float64, where different serial numbers of 17 digits can be equal
        return one.endswith("%") == other.endswith("%") and Decimal(one.rstrip("%")) == Decimal(other.rstrip("%"))
    return bool(_forms(one) & _forms(other))


def yes_or_no(words: str) -> str | None:
    """`yes` or `no` if an answer in normal form is a spelling of it, else None."""
    return "yes" if words in _YES else "no" if words in _NO else None


def _forms(text: str) -> set[str]:
    """The spellings of a text: `no` for `false`; `t-shirt`, `tshirt` and `t shirt` for `t-shirt`."""
    text = yes_or_no(text) or text
    return {text, re.sub(r"(?<=[^\W\d])-(?=\w)", "", text), re.sub(r"(?<=[^\W\d])-(?=\w)", " ", text)} - {""}


def _folded(answer: str) -> str:
    """A text in lower case with uniform digits and dashes, and with words for signs that change a number."""
    text = _RAISED.sub(r" \g<0>", answer[:MAX_CHARS].translate(INVISIBLE))
    text = unicodedata.normalize("NFKC", text).casefold()
    # convert digits of any script to 0 to 9
    text = "".join(str(unicodedata.decimal(char)) if char.isdecimal() else char for char in text)
    text = re.sub(r"</?[a-z]{1,9}>", " ", text)
    text = _DASHES.sub("-", _APOSTROPHES.sub("", text))  # "don't" becomes "dont"
    for pattern, word in _SIGNS:
        text = pattern.sub(word, text)
    return text


def _plain(text: str) -> str:
    """A text from `_folded` without punctuation, and with its numbers written as digits."""
    text = re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda match: match.group().replace(",", ""), text)
    text = re.sub(r"(?<!\d)\.(?=\d)", "0.", text) if re.match(r"\s*-?\.\d", text) else text
    text = re.sub(r"\.(?!\d)|(?<!\d)\.", "", text)  # dots other than decimal points
    text = re.sub(r"[,:](?!\d)|(?<!\d)[,:]|,|/", " ", text)
    text = re.sub(r"^\s*\$([^$]+)\$\s*$", r"\1", text)
    text = _PUNCTUATION.sub(" ", text)
    text = re.sub(rf"(?<!\S)-(?=(?:{'|'.join(_NUMBER_WORDS)})\b)", "minus ", text)
    text = re.sub(r"(?<!\S)-(?!\d)|(?<=\s)-(?=\s)|-(?!\S)", " ", text)
    text = _TENS_AND_ONE.sub(r"\1 ", text)
    text = " ".join(_with_numbers([_SPELLINGS.get(word, word) for word in text.split()]))
    text = re.sub(r"(?<!\S)(?:minus|negative) (?=\d)", "-", text)
    return re.sub(r"(?<=\d) (?:%|percent|per cent)(?!\S)", "%", text)


def _with_numbers(words: Sequence[str]) -> list[str]:
    """The words with numbers written as digits: `twenty one` is 21, `none` is 0; `two three` stays two numbers."""
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


LETTERS = string.ascii_uppercase
_LETTER = r"(?:\(([A-Za-z])\)|\b([A-Za-z])(?=,?$|[.):]+(?:\s|$)|,?\s+(?:because|since)\b))"
_PICK = re.compile(rf"^(?:the )?(?:correct )?(?:option |choice )?{_LETTER}[.):,]*\s*(.*)$", re.IGNORECASE | re.DOTALL)
# a second letter after the picked one; `a` and `A` before a word are articles
_OTHER = re.compile(r"^(?:(?:or|and)\b|,)?\s*\(?(?:[A-Za-z]\)?(?:$|[.):,]|\s+(?:or|and)\b|\s+[A-Za-z]\b)|[B-Z]\)?\s)")


def options_of(cell: object, where: str) -> tuple[str, ...]:
    """The texts of a row's options in order, without trailing empty ones; BadRowError unless 2 to 26 distinct texts."""
    texts = _by_letter(cell, where) if isinstance(cell, Mapping) else cell
    if not isinstance(texts, list | tuple):
        raise _not_options(cell, where)
    options = [_text(text) for text in texts]
    while options and not options[-1]:
        options.pop()
    if not 2 <= len(options) <= len(LETTERS):
        raise _not_options(cell, where)
    if not all(options) or len(set(options)) < len(options):
        raise bad_row(where, f"one of the options {str(options)[:60]} is empty or appears twice", "options")
    return tuple(options)


def _by_letter(cell: Mapping[object, object], where: str) -> list[object]:
    """Options that are keyed by letters, sorted by letter; the columns of a table may be in any order."""
    by_letter = {str(key).strip("(). ").upper(): text for key, text in cell.items()}
    letters = sorted(by_letter)
    if letters != list(LETTERS[: len(cell)]):
        problem = f"the options have the keys {str([*cell])[:60]}, not the letters from A on: give those, or a list"
        raise bad_row(where, problem, "options")
    return [by_letter[letter] for letter in letters]


def _text(option: object) -> str:
    is_missing = option is None or (isinstance(option, float) and math.isnan(option))
    return "" if is_missing else str(option).strip()


def _not_options(cell: object, where: str) -> BadRowError:
    return bad_row(where, f"the options are {str(cell)[:60]!r}, not a list of 2 to {len(LETTERS)} texts", "options")


def listed_options(options: Sequence[str]) -> str:
    """One line per option, which starts with its letter."""
    return "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))


def true_letter(answer: str, options: Sequence[str], where: str) -> str:
    """The letter of the true answer, which a row gives as the option's text, its letter, or its index from 0."""
    if answer in options:
        return LETTERS[options.index(answer)]
    letter = answer.strip("(). ").upper()
    if len(letter) == 1 and letter in LETTERS[: len(options)]:
        return letter
    if answer.isascii() and answer.isdigit() and int(answer) < len(options):
        return LETTERS[int(answer)]
    problem = f"the answer {answer[:60]!r} is not one of the {len(options)} options, nor the letter or index of one"
    raise bad_row(where, problem, "answer_no_option")


def option_letter(answer: str) -> str | None:
    """The letter of the option that an answer picks, as in `B`, `(b) a dog`, `Option B`; None unless it picks one."""
    picked = _picked(answer)
    return None if picked is None else picked[0]


def picked_letter(answer: str, options: Sequence[str]) -> str | None:
    """The letter of the option that an answer picks; None for none, several, or a letter with another option's text."""
    picked = _picked(answer)
    if picked is None:
        letters = _letters_of_text(answer, options)
        return letters[0] if len(letters) == 1 else None
    letter, rest = picked
    others = _letters_of_text(rest, options)
    return letter if letter in LETTERS[: len(options)] and (not others or letter in others) else None


def _letters_of_text(text: str, options: Sequence[str]) -> list[str]:
    words = spelled(text)
    return [letter for letter, option in zip(LETTERS, options, strict=False) if words and spelled(option) == words]


def _picked(answer: str) -> tuple[str, str] | None:
    """The letter that an answer starts with, and the text after it; None without exactly one letter."""
    pick = _PICK.match(answer.strip().strip("*`\"'").strip())
    if pick is None or _OTHER.match(pick[3]):
        return None
    return (pick[1] or pick[2]).upper(), pick[3]
