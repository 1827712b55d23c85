r"""Mathematical answers: the boxed answer of a response, and its equality with the truth.

An answer has one value, which is read without the truth: of `x = \frac{11}{2} \approx 6` it is the fraction. Two
answers are equal when they read the same after normalisation (`math_normalize`), or when both are formulas
(`math_formula`) of equal value. Anything else is a text (`\angle 1 \cong \angle 4`), and a text never equals a number.
Every input ends in True or False, within milliseconds: no computer algebra system sees a model's text, so there is
nothing to interrupt, on whatever thread and in however many workers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fovea.environments.graders.math_formula import Rounded, formula_value, is_close
from fovea.environments.graders.math_normalize import normalised, without_unit

# Longer answers are compared as they stand; the longest true answer of Geometry3K has 41 characters.
_MAX_CHARS = 400

BOX = r"\boxed"
_BOX_OR_BRACE = re.compile(r"\\boxed\s*\{|\\\\(?!boxed)|\\[{}]|[{}]")


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` whose braces close; None where there is none. Linear time."""
    boxes = [box for box, _ in _closed_boxes(text)]
    return text[boxes[-1]] if boxes else None


def box_end(text: str) -> int | None:
    r"""Index after the brace of the first `\boxed{...}` that is neither empty, as prompts have it, nor in another."""
    return next((box.stop + 1 for box, is_outermost in _closed_boxes(text) if is_outermost and text[box].strip()), None)


def _closed_boxes(text: str) -> Iterator[tuple[slice, bool]]:
    r"""The content of each `\boxed{...}` in the order in which they close, and True for one that is in no other."""
    starts: list[int | None] = []
    depth = 0
    for match in _BOX_OR_BRACE.finditer(text):
        token = match.group()
        if token.startswith(r"\boxed"):
            starts.append(match.end())
            depth += 1
        elif token == "{":
            starts.append(None)
        elif token == "}" and starts and (start := starts.pop()) is not None:
            depth -= 1
            yield slice(start, match.start()), depth == 0


def last_tagged(text: str) -> str | None:
    """The content of the last `<answer>...</answer>`; None where there is none."""
    before, closing, _ = text.rpartition("</answer>")
    _, opening, answer = before.rpartition("<answer>")
    return answer.strip() if closing and opening else None


def same_answer(given: str, truth: str) -> bool:
    """True if two answers, without their boxes, are equal as mathematics or as texts."""
    if max(len(given), len(truth)) > _MAX_CHARS:
        return given.strip() == truth.strip() != ""
    given, truth = normalised(given), normalised(truth)
    return any(_same(one, other) for one in _readings(given) for other in _readings(truth))


def _same(given: str, truth: str) -> bool:
    return _same_side(given, truth) or _same_relation(given, truth) or _same_list(given, truth)


def _same_side(given: str, truth: str) -> bool:
    if given == truth:
        return given != ""
    values = formula_value(given), formula_value(truth)
    if values == (None, None):
        return _as_text(given) == _as_text(truth) != ""
    return _equal(*values)


def _equal(one: Rounded | None, other: Rounded | None) -> bool:
    return one is not None and other is not None and is_close(one, other)


def _as_text(answer: str) -> str:
    """A text without spaces, and without capitals except in names such as `AB`."""
    squeezed = answer.replace(" ", "")
    return squeezed.casefold() if re.search(r"(?<!\\)\b[A-Za-z]{4}", answer) else squeezed


# What an answer says besides its value: a name, the way there, a rounded value behind it.

_NAME_COMMAND = (
    r"\\(?:angle|triangle|overline|overset|stackrel|overarc|widehat|frown|arc|sin|cos|tan|theta|alpha|beta|gamma"
    r"|phi)(?![A-Za-z])"
)
_NAME = re.compile(rf"\|?(?:[A-Za-z]|{_NAME_COMMAND})(?:[A-Za-z0-9_'(){{}} ]|{_NAME_COMMAND})*\|?:?")
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
_APPROX = re.compile(r"\\approx(?![A-Za-z])")
_SEVERAL = re.compile(r"[,;]|(?<![A-Za-z\\])(?:or|and|but)(?![A-Za-z])")
_DECIMAL = re.compile(r"-?\d*\.?(\d*)", re.ASCII)
_COLON_NAME = re.compile(r"^([A-Za-z]) ?: ?(?=[-\d\\])")


def _readings(answer: str) -> list[str]:
    """The one value of an answer, and where that has a name the equation with it: `a = 90 - b` is `a + b = 90` too."""
    exact = _exact(answer)
    bare = _without_name(exact)
    return [bare] if bare == exact else [bare, exact]


def _exact(answer: str) -> str:
    r"""An answer without rounded values: `3 \sqrt{5} \approx 6.71` says the surd, and `x \approx 12` is `x = 12`."""
    exact, *rounded = _APPROX.split(answer)
    if rounded and not exact.strip():
        return _APPROX.sub("=", r"\approx".join(rounded))
    value = _without_name(exact)
    is_rounded = rounded and all(_rounds_to(value, without_unit(each)) for each in rounded)
    return exact if is_rounded else _APPROX.sub("=", answer)


def _rounds_to(exact: str, rounded: str) -> bool:
    """True if a decimal is the rounded value of an exact form; `12.4 = 12` would be two guesses."""
    digits, values = _DECIMAL.fullmatch(rounded), (formula_value(exact), formula_value(rounded))
    if digits is None or _DECIMAL.fullmatch(exact) or values[0] is None or values[1] is None:
        return False
    return abs(values[0].value - values[1].value) <= 0.501 * 10.0 ** -len(digits[1])


def _without_name(answer: str) -> str:
    r"""The last term of `AB = \frac{24}{2} = 12`, after names and formulas that do equal it."""
    first, *rest = [part.strip() for part in _EQUALS.split(_COLON_NAME.sub(r"\1 = ", answer))]
    if not rest:
        return first
    *between, last = rest
    if any(_SEVERAL.search(part) for part in (first, *between)):
        return answer  # `x = 5, x = 6` are two equations, and no way from one to the other
    value = formula_value(without_unit(last))
    is_named = _NAME.fullmatch(first) is not None
    bare = without_unit(first)
    if not between and _NAME.fullmatch(last) and formula_value(bare) is not None and not _has_letter(bare):
        return bare  # the value in `12 = x`
    if value is None or not (is_named or _equal(formula_value(first), value)):
        return answer
    steps = [formula_value(part) for part in between]
    # a named quantity may be written out in letters on the way: `C = 2 \pi r = 13 \pi`
    if all(_equal(step, value) or (is_named and _has_letter(part)) for part, step in zip(between, steps, strict=True)):
        return without_unit(last)
    return answer


def _has_letter(part: str) -> bool:
    return re.search(r"(?<![A-Za-z\\])[A-Za-z]", part) is not None


# Relations: `b + a = 90` is `a + b = 90`, `60 > x` is `x < 60`.

_SWAPPED = {"=": "=", r"\cong": r"\cong", r"\sim": r"\sim", "<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
"""The relation that holds when the sides of each are swapped."""
_RELATION = re.compile(r"(=|<|>|\\(?:cong|sim|le|ge)(?![A-Za-z]))")


def _same_relation(given: str, truth: str) -> bool:
    """True if two texts are the same relation; each has exactly one sign between two sides."""
    match _RELATION.split(given), _RELATION.split(truth):
        case [[left, relation, right], [truth_left, truth_relation, truth_right]]:
            sides = (truth_left, truth_right)
            if relation == truth_relation and _same_sides((left, right), sides):
                return True
            return _SWAPPED[relation] == truth_relation and _same_sides((right, left), sides)
    return False


def _same_sides(given: tuple[str, str], truth: tuple[str, str]) -> bool:
    """True if the sides are equal, as they are or after terms change sides: `a = 90 - b`."""
    if _same_side(given[0], truth[0]) and _same_side(given[1], truth[1]):
        return True
    return _equal(_difference(given), _difference(truth))


def _difference(sides: tuple[str, str]) -> Rounded | None:
    left, right = formula_value(without_unit(sides[0])), formula_value(without_unit(sides[1]))
    return None if left is None or right is None else left - right


# Lists: `\angle 6 and \angle 2` is `\angle 2 and \angle 6`.

_AND = re.compile(r" ?(?:, ?and |,| and |\\?&) ?")
_ANGLES = re.compile(r"^(?:angles? |\\angle )", re.IGNORECASE)


def _same_list(given: str, truth: str) -> bool:
    """True if two lists are equal: names in any order, other items in the given order."""
    names, truth_names = _items(given), _items(truth)
    if names is not None and names == truth_names:
        return True
    items, truth_items = _in_order(given), _in_order(truth)
    if len(items) < 2 or len(items) != len(truth_items):
        return False
    return all(_same_side(one, other) for one, other in zip(items, truth_items, strict=True))


def _in_order(answer: str) -> list[str]:
    """The items between the commas of a list, behind each bracket around it: `[0, 1)` has `[`, `0`, `1` and `)`."""
    brackets = answer[:1] + answer[-1:]
    if brackets in ("()", "[]", "(]", "[)"):
        return [brackets[0], *_between_commas(answer[1:-1]), brackets[1]] if "," in answer else []
    return _between_commas(answer)


def _between_commas(answer: str) -> list[str]:
    parts, depth = [""], 0
    for char in answer:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _items(answer: str) -> tuple[bool, list[str]] | None:
    """Names of a list's items, and True if they are angles."""
    are_angles = _ANGLES.match(answer) is not None
    items = sorted(_as_text(_ANGLES.sub("", item.strip())) for item in _AND.split(answer))
    is_list = len(items) > 1 and all(items) and not re.search(r"[()\[\]{}]", answer)
    if not is_list or not (are_angles or all(re.fullmatch("[A-Z]{1,3}", item) for item in items)):
        return None
    return are_angles, items
