"""Multiple choice: options under letters, and the option that an answer picks."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Mapping, Sequence

from fovea.environments.dataset_prompts import bad_row
from fovea.environments.graders.vqa_words import spelled
from fovea.errors import BadRowError

LETTERS = string.ascii_uppercase
_LETTER = r"(?:\(([A-Za-z])\)|\b([A-Za-z])(?=,?$|[.):]+(?:\s|$)|,?\s+(?:because|since)\b))"
_PICK = re.compile(rf"^(?:the )?(?:correct )?(?:option |choice )?{_LETTER}[.):,]*\s*(.*)$", re.IGNORECASE | re.DOTALL)
# a second letter, which `a` and `A` are not before a word
_OTHER = re.compile(r"^(?:(?:or|and)\b|,)?\s*\(?(?:[A-Za-z]\)?(?:$|[.):,]|\s+(?:or|and)\b|\s+[A-Za-z]\b)|[B-Z]\)?\s)")


def options_of(cell: object, where: str) -> tuple[str, ...]:
    """The texts of a row's options, in the order of their letters.

    Options without text at the end are dropped: a table has as many columns as its longest row. BadRowError unless 2
    to 26 different ones are left.
    """
    texts = _by_letter(cell, where) if isinstance(cell, Mapping) else cell
    if not isinstance(texts, list | tuple):
        raise _not_options(cell, where)
    options = [_text(text) for text in texts]
    while options and not options[-1]:
        options.pop()
    if not 2 <= len(options) <= len(LETTERS):
        raise _not_options(cell, where)
    if not all(options) or len(set(options)) < len(options):
        raise bad_row(where, f"of the options {str(options)[:60]} one is empty or there twice", "options")
    return tuple(options)


def _by_letter(cell: Mapping[object, object], where: str) -> list[object]:
    """Options under their letters, in the order of these, as a table of any order of columns has them."""
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
    """One line per option, under its letter."""
    return "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))


def true_letter(answer: str, options: Sequence[str], where: str) -> str:
    """The letter of the true answer, which a row gives as the option's text, its letter, or its place from 0."""
    for place, option in enumerate(options):
        if option == answer:
            return LETTERS[place]
    letter = answer.strip("(). ").upper()
    if len(letter) == 1 and letter in LETTERS[: len(options)]:
        return letter
    if answer.isascii() and answer.isdigit() and int(answer) < len(options):
        return LETTERS[int(answer)]
    problem = f"the answer {answer[:60]!r} is none of the {len(options)} options, nor a letter or place of one"
    raise bad_row(where, problem, "answer_no_option")


def option_letter(answer: str) -> str | None:
    """The letter by which an answer picks an option, as in `B`, `(b) a dog`, `Option B`; None without exactly one."""
    picked = _picked(answer)
    return None if picked is None else picked[0]


def picked_letter(answer: str, options: Sequence[str]) -> str | None:
    """The option that a found answer picks; None where it picks none, several, or a letter with another's text."""
    picked = _picked(answer)
    if picked is None:
        letters = _letters_of_text(answer, options)
        return letters[0] if len(letters) == 1 else None
    letter, rest = picked
    others = _letters_of_text(rest, options)
    return letter if letter in LETTERS[: len(options)] and (not others or letter in others) else None


def _letters_of_text(text: str, options: Sequence[str]) -> list[str]:
    """The letters of the options with this text."""
    words = spelled(text)
    return [letter for letter, option in zip(LETTERS, options, strict=False) if words and spelled(option) == words]


def _picked(answer: str) -> tuple[str, str] | None:
    """A letter, and what the answer says behind it."""
    pick = _PICK.match(answer.strip().strip("*`\"'").strip())
    if pick is None or _OTHER.match(pick[3]):
        return None
    return (pick[1] or pick[2]).upper(), pick[3]
