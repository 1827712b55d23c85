"""Functions of tensors, applied to data classes that hold tensors."""

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
    """Record of the values of `make` for the tensors of these records, field by field; records within them likewise.

    All of them are of one data class, whose fields are tensors or such data classes.
    """
    values: dict[str, Any] = {}
    for field in fields(records[0]):  # type: ignore[arg-type]  # no type says "a data class"
        parts = [getattr(record, field.name) for record in records]
        values[field.name] = make(*parts) if isinstance(parts[0], Tensor) else map_tensors(make, *parts)
    return type(records[0])(**values)


def handles(tensors: Sequence[tuple[str, Tensor]]) -> bytes:
    """Names and handles of tensors: of shared memory, or of CUDA's.

    They are to be kept until the other process has opened them, and both processes have one `authkey`.
    """
    # a copy: a tensor in a CPU's memory is moved into shared memory for good
    shared = [(name, tensor if tensor.is_cuda else tensor.detach().clone()) for name, tensor in tensors]
    written = io.BytesIO()
    ForkingPickler(written).dump(shared)
    return written.getvalue()


def opened(written: bytes) -> list[tuple[str, Tensor]]:
    """The tensors of `handles`, in the other process."""
    # only the process that has started this one can send it, as an argument of a call over an inherited pipe
    return cast(list[tuple[str, Tensor]], pickle.loads(written))
