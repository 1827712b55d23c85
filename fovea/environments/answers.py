r"""Is this the right answer? The boxed answer of a text, and equality as mathematics.

Two answers are equal when they read the same after normalisation, or when both are formulas
(`formulas.py`) of equal value. What is no formula is a text (`\angle 1 \cong \angle 4`), and a text
never equals a number. Every input ends in True or False, within milliseconds.
"""

from __future__ import annotations

import re
import unicodedata

from fovea.environments.formulas import formula_value, is_close

# Longer answers are compared as they stand; the longest true answer of Geometry3K has 41 characters.
_MAX_CHARS = 400
_MAX_WRAPPERS = 20

_BOX_OR_BRACE = re.compile(r"\\boxed\s*\{|\\\\(?!boxed)|\\[{}]|[{}]")


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` whose braces close holds; None where there is none. Linear time."""
    starts: list[int | None] = []
    found: slice | None = None
    for match in _BOX_OR_BRACE.finditer(text):
        token = match.group()
        if token.startswith(r"\boxed"):
            starts.append(match.end())
        elif token == "{":
            starts.append(None)
        elif token == "}" and starts:
            start = starts.pop()
            found = found if start is None else slice(start, match.start())
    return None if found is None else text[found]


def same_answer(given: str, truth: str) -> bool:
    """Whether two answers, without their boxes, are equal as mathematics or as texts."""
    if max(len(given), len(truth)) > _MAX_CHARS:
        return given.strip() == truth.strip()
    given, truth = _normalised(given), _normalised(truth)
    return _same_side(given, truth) or _same_relation(given, truth)


def _same_side(given: str, truth: str) -> bool:
    if given == truth:
        return given != ""
    values = formula_value(given), formula_value(truth)
    if values == (None, None):
        return _as_text(given) == _as_text(truth) != ""
    return _equal(*values)


def _equal(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and is_close(one, other)


def _as_text(answer: str) -> str:
    """Spaces do not tell texts apart; capitals do where they are names, as in `AB`, not in a sentence."""
    squeezed = answer.replace(" ", "")
    return squeezed.casefold() if re.search(r"(?<!\\)\b[A-Za-z]{4}", answer) else squeezed


# What each relation reads when its sides are swapped.
_SWAPPED = {
    "=": "=",
    r"\cong": r"\cong",
    r"\sim": r"\sim",
    "<": ">",
    ">": "<",
    r"\le": r"\ge",
    r"\ge": r"\le",
}
_RELATION = re.compile(r"(=|<|>|\\(?:cong|sim|le|ge)(?![A-Za-z]))")


def _same_relation(given: str, truth: str) -> bool:
    """`b + a = 90` is `a + b = 90`, `60 > x` is `x < 60`; only one relation between two sides."""
    given_parts, truth_parts = _RELATION.split(given), _RELATION.split(truth)
    if len(given_parts) != 3 or len(truth_parts) != 3:
        return False
    left, relation, right = given_parts
    truth_left, truth_relation, truth_right = truth_parts
    if relation == truth_relation and _same_side(left, truth_left) and _same_side(right, truth_right):
        return True
    return _SWAPPED[relation] == truth_relation and _same_side(right, truth_left) and _same_side(left, truth_right)


# Normalisation: one spelling for one thing.

_SYMBOLS = {
    **dict.fromkeys("\N{DEGREE SIGN}\N{MASCULINE ORDINAL INDICATOR}\N{RING ABOVE}", r"^\circ "),
    **dict.fromkeys("\N{MINUS SIGN}\N{EN DASH}\N{EM DASH}\N{FIGURE DASH}", "-"),
    **dict.fromkeys("\N{MIDDLE DOT}\N{DOT OPERATOR}\N{ASTERISK OPERATOR}\N{BULLET}", r"\cdot "),
    **dict.fromkeys("\N{DIVISION SIGN}\N{FRACTION SLASH}\N{DIVISION SLASH}", "/"),
    "\N{MULTIPLICATION SIGN}": r"\times ",
    "\N{RATIO}": ":",
    "\N{GREEK SMALL LETTER PI}": r"\pi ",
    "\N{SQUARE ROOT}": r"\sqrt ",
    "\N{ANGLE}": r"\angle ",
    "\N{APPROXIMATELY EQUAL TO}": r"\cong ",
    "\N{ALMOST EQUAL TO}": r"\approx ",
    "\N{LESS-THAN OR EQUAL TO}": r"\le ",
    "\N{GREATER-THAN OR EQUAL TO}": r"\ge ",
    "\N{NOT EQUAL TO}": r"\ne ",
    "\N{SUPERSCRIPT TWO}": "^2",
    "\N{SUPERSCRIPT THREE}": "^3",
}
_VULGAR = {
    char: " " + unicodedata.normalize("NFKC", char).replace("\N{FRACTION SLASH}", "/") for char in "¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}
_TABLE = str.maketrans(_SYMBOLS | _VULGAR)

_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|normal)|operatorname|mbox|fbox|boxed)"
    r"\s*\{([^{}]*)\}"
)
# In this order; (?![A-Za-z]) ends a command, so that `\left(` goes and `\leftarrow` stays.
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|displaystyle|textstyle|limits)(?![A-Za-z])", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\surd(?![A-Za-z])|(?<![A-Za-z\\])sqrt(?![A-Za-z])", r"\\sqrt"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi"),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"<=|\\leq(?:slant)?(?![A-Za-z])", r"\\le "),
        (r">=|\\geq(?:slant)?(?![A-Za-z])", r"\\ge "),
        (r"\\(?:approx|simeq)(?![A-Za-z])", "="),
        (r"\\over(?:line|leftrightarrow|rightarrow) ?\{ ?([A-Z](?: ?[A-Z])*) ?\}", r" \1 "),
        (r"\{,\}", ","),
        (r"\\[()\[\]]|\\?\$|\\(?:[,;:!> ]|q?quad(?![A-Za-z]))|~|\s", " "),
        (r"\^ *(?:\{ *(?:\\circ|o) *\}|\\circ|o(?![A-Za-z]))|\\degree(?![A-Za-z])", " "),
        (r"(?<![A-Za-z\\])deg(?:rees?|\.)?(?![A-Za-z])", " "),
        (r" +", " "),
        (r"(?<=[\d)}]) to (?=[\d(\\])", ":"),
        (r"\\frac ?(\d) ?(\d)(?!\d)", r"\\frac{\1}{\2}"),
    )
]
# 1,200 and 1 200; not in brackets, where a comma parts two numbers, nor before a slash: `4 100/111` is mixed.
_GROUPED_DIGITS = re.compile(r"(?<![\d.,/(\[])[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+)(?![\d/]|,\d)")
_UNIT = re.compile(
    r"(?:(?<=[\d)}.])| )(?:(?:square|cubic|sq\.?) ?)?"
    r"(?:units?|(?:milli|centi|kilo)?met(?:er|re)s?|inch(?:es)?|foot|feet|yards?|miles?|[mck]m|ft|in|yd|mi"
    r"|(?<= )m)\.?(?: ?\^ ?(?:[23]|\{ ?[23] ?\})| squared| cubed)?$"
)
_ANSWER_IS = re.compile(r"^(?:the )?(?:final )?answer(?: is|:)(?: ?:)? ", re.IGNORECASE)
_NAME_COMMAND = (
    r"\\(?:angle|measuredangle|triangle|overline|overset|widehat|frown|arc|sin|cos|tan|theta|alpha|beta|gamma"
    r"|phi)(?![A-Za-z])"
)
_NAME = re.compile(rf"(?:[A-Za-z]|{_NAME_COMMAND})(?:[A-Za-z0-9_'(){{}} ]|{_NAME_COMMAND})*")
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")


def _normalised(answer: str) -> str:
    answer = _unwrapped(unicodedata.normalize("NFKC", answer.translate(_TABLE)))
    for pattern, replacement in _REWRITES:
        answer = pattern.sub(replacement, answer)
    answer = _GROUPED_DIGITS.sub(lambda match: re.sub("[, ]", "", match.group()), answer)
    answer = _ANSWER_IS.sub("", answer.strip()).rstrip(". ")
    return _UNIT.sub("", _without_name(answer)).strip()


def _unwrapped(answer: str) -> str:
    r"""`\text{...}` and its like replaced by what they hold, from the inside out."""
    for _ in range(_MAX_WRAPPERS):
        answer, count = _WRAPPER.subn(r" \1 ", answer)
        if not count:
            break
    return answer


def _without_name(answer: str) -> str:
    r"""`AB = \frac{24}{2} = 12` is 12: names go, and so do formulas that do equal the last one."""
    *left, last = _EQUALS.split(answer)
    value = formula_value(_UNIT.sub("", last))
    if value is None:
        return answer
    is_named = all(_NAME.fullmatch(part.strip()) or _equal(formula_value(part), value) for part in left)
    return last.strip() if is_named else answer
