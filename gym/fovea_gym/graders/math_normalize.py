r"""Normalisation of mathematical answers in LaTeX, Unicode or plain words, so that they can be compared.

`normalised` removes everything without meaning (fonts, spaces, dollar signs, all degree signs except the last) and
rewrites notations that have several spellings (`\dfrac`, `½`, `1,200`, `is less than`). It calculates nothing.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from itertools import chain

_MAX_WRAPPERS = 20
# Maximum digits of a repeating decimal; more would not fit a float64.
_MAX_REPEATING = 6

_WIDTHLESS = (range(0x200B, 0x2010), range(0x202A, 0x202F), range(0x2060, 0x206A), range(0xFE00, 0xFE10))
INVISIBLE: Mapping[int, str] = dict.fromkeys([0xAD, 0x61C, *chain(*_WIDTHLESS), 0xFEFF], "")
"""Zero-width characters: joiners, soft hyphens, text direction marks, emoji variation selectors."""
_SYMBOLS = {
    **dict.fromkeys("\N{DEGREE SIGN}\N{MASCULINE ORDINAL INDICATOR}\N{RING ABOVE}\N{RING OPERATOR}", r"\circ "),
    **dict.fromkeys("\N{MINUS SIGN}\N{EN DASH}\N{EM DASH}\N{FIGURE DASH}\N{HYPHEN}\N{NON-BREAKING HYPHEN}", "-"),
    **dict.fromkeys("\N{MIDDLE DOT}\N{DOT OPERATOR}\N{ASTERISK OPERATOR}\N{BULLET}", r"\cdot "),
    **dict.fromkeys("\N{DIVISION SIGN}\N{FRACTION SLASH}\N{DIVISION SLASH}", "/"),
    "\N{MULTIPLICATION SIGN}": r"\times ",
    "\N{RATIO}": ":",
    "\N{GREEK SMALL LETTER PI}": r"\pi ",
    "\N{SQUARE ROOT}": r"\sqrt ",
    **dict.fromkeys("\N{ANGLE}\N{MEASURED ANGLE}", r"\angle "),
    "\N{APPROXIMATELY EQUAL TO}": r"\cong ",
    "\N{ALMOST EQUAL TO}": r"\approx ",
    "\N{LESS-THAN OR EQUAL TO}": r"\le ",
    "\N{GREATER-THAN OR EQUAL TO}": r"\ge ",
    "\N{NOT EQUAL TO}": r"\ne ",
    "\N{PLUS-MINUS SIGN}": r"\pm ",
    "\N{MINUS-OR-PLUS SIGN}": r"\mp ",
    "\N{INFINITY}": r"\infty ",
    "\N{EMPTY SET}": r"\emptyset ",
    "\N{ELEMENT OF}": r"\in ",
    "\N{UNION}": r"\cup ",
    "\N{INTERSECTION}": r"\cap ",
    "\N{IDEOGRAPHIC FULL STOP}": ".",
    "\N{HALFWIDTH IDEOGRAPHIC FULL STOP}": ".",
    "\N{IDEOGRAPHIC COMMA}": ",",
}
_VULGAR = {
    char: " " + unicodedata.normalize("NFKC", char).replace("\N{FRACTION SLASH}", "/") for char in "¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}
_TABLE = {**str.maketrans(_SYMBOLS | _VULGAR), **INVISIBLE}
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹", "₀₁₂₃₄₅₆₇₈₉"
_SMALL = str.maketrans(_RAISED + _LOWERED, "0123456789" * 2)
_SMALL_FRACTION = re.compile(f"([{_RAISED}]+)[/\N{FRACTION SLASH}]([{_LOWERED}]+)")
_RAISED_DIGITS = re.compile(f"[⁻]?[{_RAISED}]+")

_FONTS = (
    r"text(?:bf|it|rm|sf|tt|up|sl|sc|normal)?|emph|math(?:rm|bf|it|sf|tt|normal)|operatorname|[mfh]?box|boxed"
    r"|boldsymbol|bm"
)
_COLOUR = r"(?:textcolor|color) ?\{[a-zA-Z]{1,20}\}"
_WRAPPER = re.compile(rf"\\(?:{_FONTS}|ensuremath|underline|mathbin|mathrel|{_COLOUR})\s*\{{([^{{}}]*)\}}")
_DEGREES = (
    r"(?:\^ *)?\\circ(?![A-Za-z])(?: *\{ *\})?|\^ *\{ *(?:\^ *)?(?:\\circ|o) *\}|\^ *o(?![A-Za-z])"
    r"|\\(?:text)?degree(?![A-Za-z])|(?<![A-Za-z\\])deg(?:rees?|\.)?(?![A-Za-z])|(?<=\d) ?度"
)
_PRICE = r"\d[\d,]*(?<!,)(?:\.\d+)?(?![\d,])"
# Applied in this order; (?![A-Za-z]) ends a command, so that `\left(` is removed and `\leftarrow` stays.
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right) ?\.|\\tag ?\{[^{}]*\}", " "),
        (r"\\(?:left|right|displaystyle|textstyle|limits)(?![A-Za-z])", ""),
        (r"\\[lr]vert(?![A-Za-z])", "|"),
        (r"\{ ?\} ?(?=\^)", ""),
        (r"\\(?:small|large|Large|LARGE|huge|Huge|bf|rm|it)(?![A-Za-z])", " "),
        (r"\\[hv]space ?\{[^{}]*\}|\\(?:color) ?\{[a-zA-Z]{1,20}\}|\*\*|`|\\\\\s*$", " "),
        (r"\\(?:[dtc]|nice|s)frac(?![A-Za-z])", r"\\frac"),
        (r"\\surd(?![A-Za-z])|(?<![A-Za-z\\])sqrt(?![A-Za-z])", r"\\sqrt"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi"),
        (r"\\%", "%"),
        (r"(?<![A-Za-z\\])(sin|cos|tan|log|ln|lg)(?![A-Za-z])", r"\\\1"),
        (r"\\(log|ln|lg) ?_ ?([0-9A-Za-z])", r"\\\1_{\2} "),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\varnothing(?![A-Za-z])|\\\{ ?\\\}", r"\\emptyset "),
        (r"\+ ?/ ?-", r"\\pm "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r" is (?:strictly )?less than ", " < "),
        (r" is (?:strictly )?greater than ", " > "),
        (r" is (?:less than or equal to|at most) ", r" \\le "),
        (r" is (?:greater than or equal to|at least) ", r" \\ge "),
        (r"<=|\\leq(?:slant)?(?![A-Za-z])", r"\\le "),
        (r">=|\\geq(?:slant)?(?![A-Za-z])", r"\\ge "),
        (r"\\simeq(?![A-Za-z])", r"\\approx "),
        (r"\\(?:measured|spherical)angle(?![A-Za-z])", r"\\angle "),
        (r"\\angle ?\{ ?(\w+) ?\}", r"\\angle \1 "),
        (r"\\over(?:line|leftrightarrow|rightarrow) ?\{ ?([A-Z](?: ?[A-Z])*) ?\}", r" \1 "),
        (r"\\colon(?![A-Za-z])|\{ ?: ?\}", ":"),
        (r"(?:\{ ?, ?\}|,) ?\\! *|\{ ?, ?\}", ","),
        (rf"\\\$ ?({_PRICE})|^ *\$ ?({_PRICE})(?=[^$]*$)", r"\1\2 dollars"),
        (r"\\[()\[\]]|\\?\$|\\(?:[,;:!> ]|q?quad(?![A-Za-z]))|~|\s", " "),
        (rf"(?:{_DEGREES}) ?(?:C|[cC]elsius)(?= *[.)]*$)", " celsius"),
        (rf"(?:{_DEGREES}) ?(?:F|[fF]ahrenheit)(?= *[.)]*$)", " fahrenheit"),
        (rf"(?:{_DEGREES})(?=[ .,;]*$)", "\N{DEGREE SIGN}"),
        (_DEGREES, " "),
        (r" +", " "),
        (r"(?<=[\d)}]) to (?=[\d(\\])", ":"),
        (r"(?<=\d) x (?=10 ?\^)", r"\\times "),
        (r"^ ?\(([^(),]*)\)[ .]*$", r"\1"),
        (r"\{([^{}]*) ?\\over(?![A-Za-z]) ?([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"^([^{}]*) ?\\over(?![A-Za-z]) ?([^{}]*)$", r"\\frac{\1}{\2}"),
        (r"\\frac ?(\d) ?(?=[\d{\\])", r"\\frac{\1}"),
        (r"(\\frac ?\{[^{}]*\}) ?(\d)(?!\d)", r"\1{\2}"),
        (r"\{ ?(\\frac ?\{[^{}]*\} ?\{[^{}]*\}) ?\}(?! ?\{)", r"\1"),
        (r"\\sqrt ?\[ ?(?:\{ ?\} ?)?\]", r"\\sqrt"),
    )
]
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar) ?\{ ?(\d+) ?\}", re.ASCII)
# 1,200 and 1 200; not in brackets, where a comma separates two numbers, nor before a slash: `4 100/111` is mixed.
_GROUPED_DIGITS = re.compile(r"(?<![\d.,/(\[])[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+)(?![\d/]|,\d)")
_ANSWER_IS = re.compile(
    r"^(?:(?:the )?(?:final |correct )?answer(?: is|:)(?: ?:)?|(?:the )?(?:correct )?(?:option|choice)(?: is|:)?"
    r"|there is|there's|approximately|about) |^答案(?:是|为)? ?:? ?(?=\S)",
    re.I,
)
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def normalised(answer: str) -> str:
    """An answer in normal form, without an introduction; a unit after the number is kept (`math_units`)."""
    answer = _SMALL_FRACTION.sub(lambda match: f" {match[1].translate(_SMALL)}/{match[2].translate(_SMALL)}", answer)
    answer = _RAISED_DIGITS.sub(_exponent, answer)
    # translate twice: NFKC creates symbols (a bold pi becomes a pi) and destroys others (lookalikes of the degree sign)
    answer = _unwrapped(unicodedata.normalize("NFKC", answer.translate(_TABLE)).translate(_TABLE))
    for pattern, replacement in _REWRITES:
        answer = pattern.sub(replacement, answer)
    answer = _REPEATING.sub(_fraction, answer)
    answer = _GROUPED_DIGITS.sub(lambda match: re.sub("[, ]", "", match.group()), answer)
    answer = _ANSWER_IS.sub("", answer.strip()).rstrip(".,; ")
    if answer == "\N{DEGREE SIGN}":
        return ""
    word = answer.casefold()
    return str(_WORDS.index(word)) if word in _WORDS else answer


def _unwrapped(answer: str) -> str:
    r"""A text with `\text{...}` and similar commands replaced by their content, from the inside out."""
    for _ in range(_MAX_WRAPPERS):
        answer, count = _WRAPPER.subn(r" \1 ", answer)
        if not count:
            break
    return answer


def _exponent(match: re.Match[str]) -> str:
    """Superscript digits as an exponent, since NFKC would turn a 2 with a raised 4 into 24."""
    exponent = match.group().replace("⁻", "-").translate(_SMALL)
    return f"^{exponent}" if len(exponent) == 1 else f"^{{{exponent}}}"


def _fraction(match: re.Match[str]) -> str:
    r"""A repeating decimal as a fraction: `13.\overline{3}` is 40/3."""
    whole, fixed, repeating = match.groups()
    if len(whole + fixed + repeating) > _MAX_REPEATING:
        return match.group()
    over = int(whole + fixed + repeating) - int(whole + fixed or "0")
    return rf"\frac{{{over}}}{{{10 ** len(fixed) * (10 ** len(repeating) - 1)}}}"
