r"""Mathematical answers: the boxed answer of a response, and its equality with the true answer.

An answer has one value, which is read without knowing the true answer: of `x = \frac{11}{2} \approx 6` it is the
fraction. Two answers are equal if their normalised texts are equal (`math_normalize`), or if both are formulas of equal
value (`math_formula`), and their units agree (`math_units`). Anything else is a text (`\angle 1 \cong \angle 4`), and a
text never equals a number. Every comparison ends within milliseconds: a model's text is never passed to a computer
algebra system, so no comparison needs a timeout, in any thread or worker process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from fovea_gym.graders.math_formula import Rounded, formula_value, is_close
from fovea_gym.graders.math_normalize import normalised
from fovea_gym.graders.math_units import agree, split_unit, without_unit

# Longer answers are compared as literal texts; the longest true answer of Geometry3K has 41 characters.
_MAX_CHARS = 400

BOX = r"\boxed"
_BOX_OR_BRACE = re.compile(r"\\boxed\s*\{|\\\\(?!boxed)|\\[{}]|[{}]")


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` whose braces close, or None. Takes linear time."""
    boxes = [box for box, _ in _closed_boxes(text)]
    return text[boxes[-1]] if boxes else None


def box_end(text: str) -> int | None:
    r"""Index after the closing brace of the first outermost `\boxed{...}` that is not empty (as it is in prompts)."""
    return next((box.stop + 1 for box, is_outermost in _closed_boxes(text) if is_outermost and text[box].strip()), None)


def _closed_boxes(text: str) -> Iterator[tuple[slice, bool]]:
    r"""The content of each `\boxed{...}` in the order in which they close, with True if it is not inside another."""
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
    """The content of the last `<answer>...</answer>`, or None."""
    before, closing, _ = text.rpartition("</answer>")
    _, opening, answer = before.rpartition("<answer>")
    return answer.strip() if closing and opening else None


def same_answer(given: str, truth: str) -> bool:
    """True if two answers, given without boxes, are equal as formulas or as texts."""
    if max(len(given), len(truth)) > _MAX_CHARS:
        return given.strip() == truth.strip() != ""
    given, truth = normalised(given), normalised(truth)
    return _same_choice(given, truth) or any(
        _same(one, other) for one in _readings(given) for other in _readings(truth)
    )


_CHOICE = re.compile(r"\(?([a-h])\)?:?|(yes|no)")


def _same_choice(given: str, truth: str) -> bool:
    """True if both answers are the same letter of multiple choice, or the same `yes` or `no`, ignoring case."""
    ours, theirs = _CHOICE.fullmatch(given.casefold()), _CHOICE.fullmatch(truth.casefold())
    return ours is not None and theirs is not None and ours.groups() == theirs.groups()


def _same(given: str, truth: str) -> bool:
    (given, unit), (truth, true_unit) = split_unit(given), split_unit(truth)
    if not agree(unit, true_unit):
        return False
    return (
        _same_side(given, truth)
        or _same_relation(given, truth)
        or _same_list(_unnamed(given, truth), _unnamed(truth, given))
        or _same_both(given, truth)
        or _same_assignments(given, truth)
    )


def _same_side(given: str, truth: str) -> bool:
    (given, unit), (truth, true_unit) = split_unit(given), split_unit(truth)
    if given == truth and unit == true_unit:
        return given != ""
    if not agree(unit, true_unit):
        return False
    values = formula_value(given), formula_value(truth)
    if values == (None, None):
        return _as_text(given) == _as_text(truth) != ""
    return _equal(*values)


def _equal(one: Rounded | None, other: Rounded | None) -> bool:
    return one is not None and other is not None and is_close(one, other)


def _as_text(answer: str) -> str:
    """A text without spaces, and in lower case unless it is a name such as `AB`."""
    squeezed = answer.replace(" ", "")
    return squeezed.casefold() if re.search(r"(?<!\\)\b[A-Za-z]{4}", answer) else squeezed


# Parts of an answer other than its value: a name, intermediate steps, a rounded value at the end.

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
    """The value of an answer and, if the value is named, the whole equation: `a = 90 - b` may equal `a + b = 90`."""
    exact = _exact(answer)
    bare = _without_name(exact)
    return [bare] if bare == exact else [bare, exact]


def _exact(answer: str) -> str:
    r"""An answer without rounded values: `3 \sqrt{5} \approx 6.71` becomes the root, `x \approx 12` is `x = 12`."""
    before, _, after = answer.rpartition("=")
    # `\frac{11}{2} = 6` is ambiguous, but a value with two or more decimals was computed from the exact form
    if re.fullmatch(r"-?\d*\.\d\d+", without_unit(after)) and _rounds_to(before, after):
        return before
    exact, *rounded = _APPROX.split(answer)
    if rounded and not exact.strip():
        return _APPROX.sub("=", r"\approx".join(rounded))
    return exact if rounded and all(_rounds_to(exact, each) for each in rounded) else _APPROX.sub("=", answer)


def _rounds_to(exact: str, rounded: str) -> bool:
    """True if a decimal is the rounded value of an exact form; false for `12.4 = 12`, which is two guesses."""
    exact, rounded = without_unit(_without_name(exact)), without_unit(rounded)
    digits, values = _DECIMAL.fullmatch(rounded), (formula_value(exact), formula_value(rounded))
    if digits is None or _DECIMAL.fullmatch(exact) or values[0] is None or values[1] is None or _has_letter(exact):
        return False
    return abs(values[0].value - values[1].value) <= 0.501 * 10.0 ** -len(digits[1])


def _without_name(answer: str) -> str:
    r"""The last term of `AB = \frac{24}{2} = 12`, if the terms before it are names or formulas of equal value."""
    first, *rest = [part.strip() for part in _EQUALS.split(_COLON_NAME.sub(r"\1 = ", answer))]
    if not rest:
        return first
    *between, last = rest
    if any(_SEVERAL.search(part) for part in (first, *between)):
        return answer  # `x = 5, x = 6` are two equations, not steps of one calculation
    value = formula_value(without_unit(last))
    is_named = _NAME.fullmatch(first) is not None
    bare = without_unit(first)
    if not between and _NAME.fullmatch(last) and formula_value(bare) is not None and not _has_letter(bare):
        return first  # the value in `12 = x`
    if value is None or not (is_named or _equal(formula_value(first), value)):
        return answer
    steps = [formula_value(part) for part in between]
    # the steps of a named quantity may contain letters: `C = 2 \pi r = 13 \pi`
    if all(_equal(step, value) or (is_named and _has_letter(part)) for part, step in zip(between, steps, strict=True)):
        return last
    return answer


def _has_letter(part: str) -> bool:
    return re.search(r"(?<![A-Za-z\\])[A-Za-z]", part) is not None


# Relations: `b + a = 90` is `a + b = 90`, `60 > x` is `x < 60`.

_SWAPPED = {"=": "=", r"\cong": r"\cong", r"\sim": r"\sim", "<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
"""For each relation, the equivalent relation with its sides swapped."""
_RELATION = re.compile(r"(=|<|>|\\(?:cong|sim|le|ge)(?![A-Za-z]))")


def _same_relation(given: str, truth: str) -> bool:
    """True if two texts are the same relation; each must have exactly one relation sign."""
    match _RELATION.split(given), _RELATION.split(truth):
        case [[left, relation, right], [truth_left, truth_relation, truth_right]]:
            sides = (truth_left, truth_right)
            if relation == truth_relation and _same_sides((left, right), sides):
                return True
            return _SWAPPED[relation] == truth_relation and _same_sides((right, left), sides)
    return False


def _same_sides(given: tuple[str, str], truth: tuple[str, str]) -> bool:
    """True if the sides are equal, directly or after terms move to the other side: `a = 90 - b`."""
    if _same_side(given[0], truth[0]) and _same_side(given[1], truth[1]):
        return True
    return _equal(_difference(given), _difference(truth))


def _difference(sides: tuple[str, str]) -> Rounded | None:
    left, right = formula_value(without_unit(sides[0])), formula_value(without_unit(sides[1]))
    return None if left is None or right is None else left - right


# Lists: `\angle 6 and \angle 2` is `\angle 2 and \angle 6`, `\{2, 1\}` is `\{1, 2\}`, `P(3, 4)` is `(3, 4)`.

_AND = re.compile(r" ?(?:, ?and |,| and |\\?&) ?")
_ANGLES = re.compile(r"^(?:angles? |\\angle )", re.IGNORECASE)
_LIST_NAME = re.compile(r"([A-Za-z](?:_ ?\{? ?\w ?\}?)?'?) ?(?:=|\\in(?![A-Za-z])) ?(?=[(\[{]|\\\{)|([A-Z]'?) ?(?=\()")


def _unnamed(answer: str, other: str) -> str:
    r"""A point, interval or set such as `x \in [0, 1)` without its name, unless the other answer has another name."""
    named, others = _LIST_NAME.match(answer), _LIST_NAME.match(other)
    is_named_alike = named and others and (named[1] or named[2]) == (others[1] or others[2])
    return answer[named.end() :] if named and (others is None or is_named_alike) else answer


def _same_list(given: str, truth: str) -> bool:
    """True if two lists are equal; names and the items of sets may be in any order, other items may not."""
    names, truth_names = _items(given), _items(truth)
    if names is not None and names == truth_names:
        return True
    ours, theirs = _set(given), _set(truth)
    if ours and theirs:
        return _same_set(ours, theirs)
    return _same_items(ours or _in_order(given), theirs or _in_order(truth))


def _same_items(items: list[str], truth_items: list[str]) -> bool:
    if len(items) < 2 or len(items) != len(truth_items):
        return False
    return all(_same_side(one, other) for one, other in zip(items, truth_items, strict=True))


def _set(answer: str) -> list[str]:
    r"""The items of a set in braces, `\{1, 2\}` or `{1, 2}`; an empty list for other answers."""
    found = _SET.fullmatch(answer)
    items = _between_commas((found[1] or found[2] or "").strip()) if found else []
    is_one = all(item.count("{") == item.count("}") for item in items)
    return items if is_one and (len(items) > 1 or answer.startswith("\\")) else []


_SET = re.compile(r"\\\{(.*)\\\}|\{(.*)\}", re.DOTALL)


def _same_set(items: list[str], truth_items: list[str]) -> bool:
    """True if the two lists have equal items, in any order."""
    pairs = zip(sorted(items, key=_rank), sorted(truth_items, key=_rank), strict=False)
    return len(items) == len(truth_items) and all(
        _same_side(one, other) or _same_items(_in_order(one), _in_order(other)) for one, other in pairs
    )


def _rank(item: str) -> tuple[float, str]:
    """A sort key that puts equal items of two sets at the same place; points are sorted by their texts."""
    value = formula_value(without_unit(item))
    return (math.inf, _as_text(item).replace("+", "")) if value is None else (value.value, "")


# Several values: `\pm 3` is `3, -3`, and `x = 2, y = 3` is `(x, y) = (2, 3)`.

_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_OR = re.compile(r" ?(?:[,;] ?(?:or|and)(?![A-Za-z])|;|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])) ?")
_AND_ALSO = re.compile(r" ?(?:[,;] ?and(?![A-Za-z])|;|(?<![A-Za-z\\])and(?![A-Za-z])) ?")
_VARIABLE = re.compile(r"([A-Za-z]|\\[a-z]+)(?: ?_ ?\{? ?(\w) ?\}?)?")


def _same_both(given: str, truth: str) -> bool:
    r"""True if two answers have the same values, at least two, and one of the answers uses `\pm`."""
    if not _PLUS_MINUS.search(given) and not _PLUS_MINUS.search(truth):
        return False
    ours = _values(given)
    return len(ours) > 1 and _same_set(ours, _values(truth))


def _values(answer: str) -> list[str]:
    r"""The values of `x = 3 or x = -3` or `x = \pm 3`; an empty list if names differ or an item has two signs."""
    items = _set(answer) or _between_commas(_OR.sub(",", answer))
    values, names = [], set()
    for item in items:
        if len(signs := _PLUS_MINUS.findall(item)) > 1:
            return []
        name, equals, value = item.partition("=")
        names |= {match[1] for match in [_VARIABLE.fullmatch(name.strip())] if match and equals}
        term = value if equals and _NAME.fullmatch(name.strip()) else item
        values += [_PLUS_MINUS.sub(sign, term).strip() for sign in (("+", "-") if signs else ("",))]
    return values if len(names) < 2 else []


def _same_assignments(given: str, truth: str) -> bool:
    """True if two answers assign the same values; a bare point assigns its coordinates in alphabetical order."""
    ours, theirs = _assignments(given), _assignments(truth)
    ours, theirs = ours or _assigned(given, theirs), theirs or _assigned(truth, ours)
    return len(ours) > 1 and ours.keys() == theirs.keys() and all(_same_side(ours[name], theirs[name]) for name in ours)


def _assignments(answer: str) -> dict[str, str]:
    """The values by variable name in `x = 2, y = 3` or `(x, y) = (2, 3)`; empty for other answers."""
    pairs = [_EQUALS.split(item) for item in _between_commas(_AND_ALSO.sub(",", answer))]
    if len(pairs) == 1 and len(pairs[0]) == 2:
        names, values = map(_coordinates, pairs[0])
        pairs = [list(pair) for pair in zip(names, values, strict=True)] if len(names) == len(values) else []
    found = {pair[0].strip(): pair[1].strip() for pair in pairs if len(pair) == 2}
    are_names = all(map(_VARIABLE.fullmatch, found))
    return found if are_names and len(found) == len(pairs) > 1 else {}


def _assigned(point: str, names: dict[str, str]) -> dict[str, str]:
    values = _coordinates(point)
    in_order = sorted(names, key=lambda name: name.lstrip("\\"))
    return dict(zip(in_order, values, strict=True)) if len(values) == len(names) else {}


def _coordinates(point: str) -> list[str]:
    """The coordinates of a point; an empty list for an interval or a list without brackets."""
    items = _in_order(point.strip())
    return items[1:-1] if items[:1] == ["("] and items[-1:] == [")"] else []


def _in_order(answer: str) -> list[str]:
    """The items of a list separated by commas, with the brackets around it: `[`, `0`, `1` and `)` for `[0, 1)`."""
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
    """True if a list's items are angles, and their sorted names; None if the answer is not a list of names."""
    are_angles = _ANGLES.match(answer) is not None
    items = sorted(_as_text(_ANGLES.sub("", item.strip())) for item in _AND.split(answer))
    is_list = len(items) > 1 and all(items) and not re.search(r"[()\[\]{}]", answer)
    if not is_list or not (are_angles or all(re.fullmatch("[A-Z]{1,3}", item) for item in items)):
        return None
    return are_angles, items
