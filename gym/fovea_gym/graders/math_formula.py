r"""The value of a short LaTeX formula, computed by our own parser: no eval, and any input ends quickly.

The grammar, from the loosest binding to the tightest (spaces matter only in mixed numbers):

    ratio    sum [":" sum]
    sum      product (("+" | "-") product)*
    product  signed (("*" | "\cdot" | "\times" | "/" | "\div") signed | power)*   16(4 - \pi), 10 y
    signed   ("+" | "-")* power
    power    atom ["^" argument]                                                  no "^" inside an exponent
    atom     number | mixed | letter | \pi | \sqrt | \frac | function | "(" sum ")" | "{" sum "}" | "|" sum "|"
    mixed    4 \frac{4}{11} | 4 4/11
    function (\sin | \cos | \tan | \ln | \lg | \log ["_" argument]) ["^" argument] (group | factors)

A letter stands for a fixed transcendental number, so two formulas in `y` are equal if they are the same polynomial.
Angles are in radians, where the sine of a whole number is never a fraction: `\sin 30` equals only itself. The base of a
bare `\log` is unknown and is also represented by a fixed number.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_ROUNDING = 2.0**-51
"""Relative error of one operation: twice the spacing of floats, since some functions round less exactly than `+`."""
_TOLERANCE = 1e-12
"""Relative; numbers further apart than this are never equal, whatever their error bounds."""
_SMALLEST = 1e-300


@dataclass(frozen=True, slots=True)
class Rounded:
    """A number with a bound on its rounding error."""

    value: float
    error: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and math.isfinite(self.error)):
            raise OverflowError(f"{self.value} with an error of {self.error}")

    def __add__(self, other: Rounded) -> Rounded:
        """The sum; ArithmeticError if rounding would lose one of the terms, as in `2^{60} + 1`."""
        small, large = sorted((self, other), key=lambda term: abs(term.value))
        if not small.is_zero() and abs(small.value) < _ROUNDING * abs(large.value):
            raise ArithmeticError(f"{small.value} is lost when added to {large.value}")
        return _of(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Rounded) -> Rounded:
        return self + -other

    def __neg__(self) -> Rounded:
        return Rounded(-self.value, self.error)

    def __abs__(self) -> Rounded:
        return Rounded(abs(self.value), self.error)

    def __mul__(self, other: Rounded) -> Rounded:
        value = self.value * other.value
        _check_underflow(value, self.value and other.value)
        return _of(value, abs(self.value) * other.error + abs(other.value) * self.error)

    def __truediv__(self, other: Rounded) -> Rounded:
        value = self.value / other.value
        _check_underflow(value, self.value)
        return _of(value, (self.error + abs(value) * other.error) / abs(other.value))

    def __pow__(self, exponent: Rounded) -> Rounded:
        """The power; ArithmeticError if it is not a real number."""
        value = self.value**exponent.value
        if isinstance(value, complex):
            raise ArithmeticError(f"{self.value} to the power of {exponent.value}")
        _check_underflow(value, self.value)
        if self.value == 0:
            return _of(value, self.error ** min(1.0, exponent.value) if exponent.value > 0 else 0.0)
        of_base = exponent.value * self.error / self.value
        return _of(value, abs(value) * (abs(of_base) + exponent.error * abs(math.log(abs(self.value)))))

    def sin(self, shift: float = 0.0) -> Rounded:
        """The sine of the value plus `shift`; a shift of pi / 2 gives the cosine."""
        return _of(math.sin(self.value + shift), self.error + _ROUNDING * (abs(self.value) + shift))

    def ln(self) -> Rounded:
        """The natural logarithm; ArithmeticError if it is not a real number."""
        if self.value <= 0:
            raise ArithmeticError(f"the logarithm of {self.value}")
        return _of(math.log(self.value), self.error / self.value)

    def is_zero(self) -> bool:
        """True if the number is 0 up to rounding."""
        return abs(self.value) <= min(self.error, _TOLERANCE)


def is_close(one: Rounded, other: Rounded) -> bool:
    """True if two numbers are equal up to rounding."""
    if one.is_zero() or other.is_zero():
        return one.is_zero() and other.is_zero()
    largest = max(abs(one.value), abs(other.value))
    return abs(one.value - other.value) <= min(one.error + other.error, _TOLERANCE * largest)


def _check_underflow(value: float, of: float) -> None:
    """Raise ArithmeticError for a result near the underflow of float64, where it loses digits or becomes 0."""
    if of and abs(value) < _SMALLEST:
        raise ArithmeticError(f"a result as small as {value}")


def _of(value: float, error: float) -> Rounded:
    return Rounded(value, error + _ROUNDING * abs(value))


_MAX_NESTING = 20
# Any power within float64 is computed quickly, and no real answer has a larger exponent.
_MAX_EXPONENT = 300
_MAX_DEGREE = 20
# Beyond this angle the sine of a float64 is too imprecise.
_MAX_ANGLE = 1e6
# With more than 15 digits, different integers can be equal in float64.
_MAX_DIGITS = 15
# A decimal with this many digits is taken to be rounded: 13.333333333333 is 40/3.
_ROUNDED_FROM_DIGITS = 12
_HALF = 0.499

_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d\d?(?!\d))?"
_TOKEN = re.compile(rf"\s*({_NUMBER}|\\?[A-Za-z]+|[-+*/^(){{}}:\[\]|]|.)", re.ASCII | re.DOTALL)
_TIMES = ("*", r"\cdot", r"\times")
_OVER = ("/", r"\div")
# Tokens that may continue an implicit product, besides a letter; a digit may follow only _BEFORE_DIGITS, unlike `6 0`.
_FACTOR_STARTS = ("(", "{", r"\pi", r"\sqrt", r"\frac")
_BEFORE_DIGITS = (r"\pi", ")")
_FUNCTIONS = (r"\sin", r"\cos", r"\tan", r"\ln", r"\lg", r"\log")
_CLOSING = {"(": ")", "{": "}", "|": "|"}
_ONE = Rounded(1.0)
_BASE = 2 + math.sin(0.5)
"""Value for the unknown base of a bare logarithm, chosen like the value of a letter."""


class _NotAFormula(Exception):
    pass


def formula_value(text: str) -> Rounded | None:
    """The value of a formula; None for a text outside the grammar, or a value that is too large."""
    try:
        return _Parser(_TOKEN.findall(text.strip())).ratio()
    except (_NotAFormula, ArithmeticError):
        return None


def _is_letter(token: str) -> bool:
    return len(token) == 1 and token.isascii() and token.isalpha()


def _is_number(token: str) -> bool:
    return token[:1].isascii() and (token[:1].isdigit() or token[:1] == ".")


def _number(token: str) -> Rounded:
    num_digits = sum(map(str.isdigit, token))
    if not _is_number(token) or token == "." or num_digits > _MAX_DIGITS:
        raise _NotAFormula
    if token.isdigit():
        return Rounded(float(token))
    _, _, decimals = token.partition(".")
    is_rounded = decimals.isdigit() and num_digits >= _ROUNDED_FROM_DIGITS
    return Rounded(float(token), _HALF * 10.0 ** -len(decimals) if is_rounded else 0.0) * _ONE


class _Parser:
    """A recursive-descent parser; each method reads one construct and starts where the previous one stopped."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._nesting = 0
        self._in_exponent = False

    def ratio(self) -> Rounded:
        value = self._sum()
        if self._take(":"):
            value /= self._sum()
        if self._peek():
            raise _NotAFormula
        return value

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, *expected: str) -> bool:
        is_next = self._peek() in expected
        self._at += is_next
        return is_next

    def _need(self, token: str) -> None:
        if not self._take(token):
            raise _NotAFormula

    def _sum(self) -> Rounded:
        value = self._product()
        while (sign := self._peek()) in ("+", "-"):
            self._at += 1
            value += self._product() if sign == "+" else -self._product()
        return value

    def _product(self) -> Rounded:
        value = self._signed()
        while True:
            if self._take(*_TIMES):
                value *= self._signed()
            elif self._take(*_OVER):
                value /= self._signed()
            elif self._goes_on():
                value *= self._power()
            else:
                return value

    def _goes_on(self) -> bool:
        # two letters side by side are the name of a segment or a word, not a product
        token, previous = self._peek(), self._tokens[self._at - 1]
        if _is_number(token):
            return previous in _BEFORE_DIGITS
        return token in (*_FACTOR_STARTS, *_FUNCTIONS) or (_is_letter(token) and not _is_letter(previous))

    def _signed(self) -> Rounded:
        is_negative = False
        while (token := self._peek()) in ("+", "-"):
            is_negative ^= token == "-"
            self._at += 1
        value = self._power()
        return -value if is_negative else value

    def _power(self) -> Rounded:
        base = self._atom()
        if not self._take("^"):
            return base
        if self._in_exponent:
            raise _NotAFormula
        self._in_exponent = True
        exponent = self._argument()
        self._in_exponent = False
        if abs(exponent.value) > _MAX_EXPONENT:
            raise _NotAFormula
        return base**exponent

    def _atom(self) -> Rounded:
        self._nesting += 1
        if self._nesting > _MAX_NESTING:
            raise _NotAFormula
        token = self._peek()
        self._at += 1
        value = self._value_from(token)
        self._nesting -= 1
        return value

    def _value_from(self, token: str) -> Rounded:
        if token in _CLOSING:
            value = self._sum()
            self._need(_CLOSING[token])
            return abs(value) if token == "|" else value
        if token == r"\sqrt":
            return self._root()
        if token == r"\frac":
            return self._argument() / self._argument()
        if token in _FUNCTIONS:
            return self._function(token)
        if token == r"\pi" or _is_letter(token):
            return Rounded(math.pi if token == r"\pi" else 2 + math.sin(ord(token))) * _ONE
        return _number(token) + self._fraction_of_mixed(token)

    def _argument(self) -> Rounded:
        r"""The argument of a command or an exponent: a group, a number or a symbol (`\sqrt 3`)."""
        if _is_number(self._peek()):
            self._at += 1
            return _number(self._tokens[self._at - 1])
        return self._atom()

    def _root(self) -> Rounded:
        degree = Rounded(2.0)
        if self._take("["):
            degree = self._argument()
            self._need("]")
        radicand = self._argument()
        if radicand.value < 0 or not 2 <= degree.value <= _MAX_DEGREE:
            raise _NotAFormula
        return radicand ** (_ONE / degree)

    def _function(self, name: str) -> Rounded:
        r"""A function of a group or of the factors that follow: `\sin(30)`, `\log_{2} 8`, `\cos^2 2 \pi x`."""
        base = Rounded(10.0)
        if name == r"\log":
            base = self._argument() if self._take("_") else Rounded(_BASE)
        power = self._argument() if self._take("^") else _ONE
        # `\sin^{-1}` is the arcsine
        if not 1 <= power.value <= _MAX_DEGREE:
            raise _NotAFormula
        if self._peek() in ("(", "{"):
            argument = self._atom()
        else:
            argument = self._signed()
            while self._peek() not in ("(", "{", *_FUNCTIONS) and self._goes_on():
                argument *= self._power()
        if name in (r"\ln", r"\lg", r"\log"):
            value = argument.ln() if name == r"\ln" else argument.ln() / base.ln()
        elif abs(argument.value) > _MAX_ANGLE:
            raise _NotAFormula
        elif name == r"\sin":
            value = argument.sin()
        else:
            cosine = argument.sin(math.pi / 2)
            value = cosine if name == r"\cos" else argument.sin() / cosine
        return value**power

    def _fraction_of_mixed(self, whole: str) -> Rounded:
        """The 4/11 of a mixed number; 0 if no fraction follows the integer."""
        match self._tokens[self._at : self._at + 7]:
            case [r"\frac", "{", over, "}", "{", under, "}"]:
                num_tokens = 7
            case [over, "/", under, *_]:
                num_tokens = 3
            case _:
                return Rounded(0.0)
        if not all(part.isascii() and part.isdigit() for part in (whole, over, under)):
            return Rounded(0.0)
        numerator, denominator = _number(over), _number(under)
        # an improper fraction is a factor, as in `3 \frac{7}{2}`
        if numerator.value >= denominator.value:
            return Rounded(0.0)
        self._at += num_tokens
        return numerator / denominator
