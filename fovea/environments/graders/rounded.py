"""Arithmetic in float64 that carries a bound of its rounding errors, so that only rounding counts as none.

Each operation adds one rounding of its result, and passes the errors of its operands on to first order (Higham,
Accuracy and Stability of Numerical Algorithms, 2002, sections 2.2 and 3.1). A result that is no finite number is an
ArithmeticError.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_ROUNDING = 2.0**-51
"""Relative, of one operation: twice the distance of neighbours, for functions that round less well than `+`."""
_TOLERANCE = 1e-12
"""Relative; no bound of errors makes two numbers equal that are further apart."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """A number, and how far rounding may have moved it."""

    value: float
    error: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and math.isfinite(self.error)):
            raise OverflowError(f"{self.value} with an error of {self.error}")

    def __add__(self, other: Rounded) -> Rounded:
        return _of(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Rounded) -> Rounded:
        return self + -other

    def __neg__(self) -> Rounded:
        return Rounded(-self.value, self.error)

    def __abs__(self) -> Rounded:
        return Rounded(abs(self.value), self.error)

    def __mul__(self, other: Rounded) -> Rounded:
        return _of(self.value * other.value, abs(self.value) * other.error + abs(other.value) * self.error)

    def __truediv__(self, other: Rounded) -> Rounded:
        value = self.value / other.value
        return _of(value, (self.error + abs(value) * other.error) / abs(other.value))

    def __pow__(self, exponent: Rounded) -> Rounded:
        """ArithmeticError where the power is no real number."""
        value = self.value**exponent.value
        if isinstance(value, complex):
            raise ArithmeticError(f"{self.value} to the power of {exponent.value}")
        if self.value == 0:
            return _of(value, self.error ** min(1.0, exponent.value) if exponent.value > 0 else 0.0)
        of_base = exponent.value * self.error / self.value
        return _of(value, abs(value) * (abs(of_base) + exponent.error * abs(math.log(abs(self.value)))))

    def is_zero(self) -> bool:
        """Whether it is 0 but for rounding."""
        return abs(self.value) <= min(self.error, _TOLERANCE)


def is_close(one: Rounded, other: Rounded) -> bool:
    """Whether two numbers are equal but for rounding."""
    if one.is_zero() or other.is_zero():
        return one.is_zero() and other.is_zero()
    largest = max(abs(one.value), abs(other.value))
    return abs(one.value - other.value) <= min(one.error + other.error, _TOLERANCE * largest)


def _of(value: float, error: float) -> Rounded:
    return Rounded(value, error + _ROUNDING * abs(value))
