"""Functions on tensors, applied to dataclasses that hold tensors."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import fields
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar, cast

from torch import Tensor

Record = TypeVar("Record")


def map_tensors(make: Callable[..., Tensor], *records: Record) -> Record:
    """Apply `make` to the tensors of records of one dataclass, field by field, including nested ones; a new record."""
    values: dict[str, Any] = {}
    for field in fields(records[0]):  # type: ignore[arg-type]  # there is no type for "a dataclass"
        parts = [getattr(record, field.name) for record in records]
        values[field.name] = make(*parts) if isinstance(parts[0], Tensor) else map_tensors(make, *parts)
    return type(records[0])(**values)


def handles(tensors: Sequence[tuple[str, Tensor]]) -> bytes:
    """Names and handles of tensors, in shared memory or in CUDA memory.

    Keep the tensors until the other process has opened the handles; both processes need the same `authkey`.
    """
    # copied, since a CPU tensor would be moved into shared memory permanently
    shared = [(name, tensor if tensor.is_cuda else tensor.detach().clone()) for name, tensor in tensors]
    written = io.BytesIO()
    ForkingPickler(written).dump(shared)
    return written.getvalue()


def opened(written: bytes) -> list[tuple[str, Tensor]]:
    """Open the tensors of `handles` in the other process."""
    # only the process that started this one can send these bytes, as an argument of a call over an inherited pipe
    return cast(list[tuple[str, Tensor]], pickle.loads(written))
