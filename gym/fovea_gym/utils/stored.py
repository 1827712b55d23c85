"""Records stored as JSON, written and read with pydantic's TypeAdapter; the files may be untrusted."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BeforeValidator, PlainSerializer, TypeAdapter, ValidationError

from fovea_gym.errors import DataError
from fovea_gym.utils.files import json_number

T = TypeVar("T")
MAX_SHOWN_CHARS = 60
"""Maximum characters of an invalid value in an error message."""


def _nan_of_null(value: object) -> object:
    return float("nan") if value is None else value


Number: TypeAlias = Annotated[
    float, BeforeValidator(_nan_of_null), PlainSerializer(json_number, return_type=float | None, when_used="json")
]
"""A float that may be NaN or infinite; these are written to JSON as null, which is read as NaN."""


def as_json(adapter: TypeAdapter[T], value: T) -> Any:
    """A record as dicts, lists, strings and numbers, as in JSON."""
    # not `dump_json`: text of a data set may contain lone surrogates, which UTF-8 cannot encode but an escape can
    return adapter.dump_python(value, mode="json")


def to_json(adapter: TypeAdapter[T], value: T, *, indent: int | None = None) -> str:
    """A record as ASCII JSON, with null for numbers that are not finite."""
    return json.dumps(as_json(adapter, value), allow_nan=False, indent=indent)


def from_json(adapter: TypeAdapter[T], content: str | bytes, what: str, fix: str = "delete that file") -> T:
    """Parse a record from JSON; raises DataError in one line, `what (fault); fix`, for invalid content."""
    try:
        return adapter.validate_python(json.loads(content))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} ({_fault(error)}); {fix}") from error


def _fault(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{f'{where}: ' if where else ''}{first['msg']}, not {repr(first['input'])[:MAX_SHOWN_CHARS]}"
