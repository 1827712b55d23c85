"""Functions of tensors, applied to data classes that hold tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from torch import Tensor

Record = TypeVar("Record")


def map_tensors(make: Callable[..., Tensor], *records: Record) -> Record:
    """Record of the values of `make` for the tensors of these records, field by field; records within them likewise.

    All of them are of one data class, whose fields are tensors or such data classes.
    """
    values: dict[str, Any] = {}
    for field in fields(records[0]):  # type: ignore[arg-type]  # no type says "a data class"
        parts = [getattr(record, field.name) for record in records]
        values[field.name] = make(*parts) if isinstance(parts[0], Tensor) else map_tensors(make, *parts)
    return type(records[0])(**values)
