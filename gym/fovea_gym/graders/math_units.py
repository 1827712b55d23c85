r"""The unit after a number: `12 cm`, `36 \text{ square feet}`, `70^\circ C`, `50 \%`.

If only one of two answers has a unit, the other is taken to mean the same one; if both have units, these must be equal,
including their powers.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Names and spellings; each spelling may end in a full stop. Single letters other than `m` would be variables.
_SPELLINGS = {
    "mm": "mm millimeter millimeters millimetre millimetres 毫米",
    "cm": "cm cms centimeter centimeters centimetre centimetres 厘米",
    "dm": "dm decimeter decimeters decimetre decimetres 分米",
    "m": "meter meters metre metres 米",
    "km": "km kms kilometer kilometers kilometre kilometres 千米 公里",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yds yard yards",
    "mi": "mi mile miles",
    "unit": "unit units",
    "g": "gram grams 克",
    "mg": "mg milligram milligrams",
    "kg": "kg kgs kilogram kilograms 千克 公斤",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "t": "ton tons tonne tonnes",
    "ml": "ml milliliter milliliters millilitre millilitres 毫升",
    "l": "liter liters litre litres 升",
    "gal": "gallon gallons",
    "s": "sec secs second seconds 秒",
    "min": "min mins minute minutes 分钟",
    "h": "hr hrs hour hours 小时",
    "day": "day days 天",
    "week": "week weeks 周",
    "month": "month months",
    "year": "year years yr yrs 年",
    "mol": "mol mols mole moles",
    "dollar": "dollar dollars usd",
    "cent": "cent cents",
    "euro": "euro euros eur",
    "yuan": "yuan rmb 元",
    "degree": "°",
    "celsius": "celsius centigrade 摄氏度",
    "fahrenheit": "fahrenheit 华氏度",
    "kelvin": "kelvin kelvins",
    "mi/h": "mph",
    "km/h": "kph kmh",
    "j": "joule joules",
    "kj": "kj kilojoule kilojoules",
    "n": "newton newtons",
    "w": "watt watts",
    "kw": "kw kilowatt kilowatts",
    "v": "volt volts",
    "a": "amp amps ampere amperes",
    "ohm": "ohm ohms",
    "hz": "hz hertz",
    "pa": "pa pascal pascals",
}
_NAMES = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()}
_LENGTHS = ("mm", "cm", "dm", "m", "km", "in", "ft", "yd", "mi")
_TEMPERATURES = ("celsius", "fahrenheit")
# after a slash, a single letter is a unit, too
_UNDER = {"s": "s", "h": "h", "m": "m", **_NAMES}

_ANY = "|".join(sorted(_NAMES, key=len, reverse=True))
_ANY_UNDER = "|".join(sorted(_UNDER, key=len, reverse=True))
_POWERS = {"square": 2, "sq": 2, "平方": 2, "cubic": 3, "cu": 3, "立方": 3}
_UNIT = re.compile(
    # never after a word: `a few days` is a text
    r"(?:(?<=[\d)}.])|(?<![a-z]{3}) )(?P<open>\()?(?:(square|cubic|linear|sq|cu)\.? ?|(平方|立方))?"
    rf"((?i:{_ANY})|(?<=[ \d])m|(?<=\d)(?:''|\"))(?: ?(?:/| per ) ?((?i:{_ANY_UNDER})))?"
    r"\.?( ?\^ ?(?:[23]|\{ ?[23] ?\})| squared| cubed)?(?(open)\))$"
)
_PERCENT = re.compile(r"(?<=[\d}.]) ?(?:%|per ?cent|pct\.?)$", re.IGNORECASE)
_MIXED = r"\d[\d,]*(?:\.\d*)?(?: ?\\frac ?\{ ?\d+ ?\} ?\{ ?\d+ ?\}| ?/ ?\d+| \d+ ?/ ?\d+)?"
_SHARE = re.compile(
    rf"(?:.*(?:=|\\approx) ?)?[-+]? ?(?:{_MIXED}|\.\d+|\\frac ?\{{ ?\d+ ?\}} ?\{{ ?\d+ ?\}})", re.DOTALL
)
"""A single number before a percent sign; in a sum such as `100 - 50\\%` the sign means a hundredth instead."""


class Unit(NamedTuple):
    """A unit of measure."""

    name: str
    power: int = 1


def split_unit(answer: str) -> tuple[str, Unit | None]:
    """A number and its unit: `36 square feet` is 36, in feet to the power of 2."""
    answer = answer.strip()
    if answer.isdigit():
        return answer, None
    if percent := _PERCENT.search(answer):
        number = answer[: percent.start()].strip()
        return (number, Unit("percent")) if _SHARE.fullmatch(number) else (answer, None)
    found = _UNIT.search(answer)
    if found is None:
        return answer, None
    _, before, chinese, over, under, behind = found.groups()
    name = _NAMES.get(over.lower(), "m" if over == "m" else "in")
    if under is not None:
        name = f"{name}/{_UNDER[under.lower()]}"
    power = _POWERS.get(before or chinese, 1) if behind is None else 3 if re.search("3|cubed", behind) else 2
    return answer[: found.start()].strip(), Unit(name, power)


def without_unit(answer: str) -> str:
    """A number without its unit."""
    return split_unit(answer)[0]


def agree(one: Unit | None, other: Unit | None) -> bool:
    """True unless two units contradict each other; `units` and a degree sign leave the exact unit open."""
    if one is None or other is None or one == other:
        return True
    names = {one.name, other.name}
    is_vague = ("unit" in names and names & {*_LENGTHS}) or ("degree" in names and names & {*_TEMPERATURES})
    return bool(is_vague) and one.power == other.power
