"""Tensors for another process on this machine, which opens their memory instead of getting a copy."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import cast

from torch import Tensor


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
    """The tensors of `handles`, in the other process. It is a pickle: it must come from a process of the same run."""
    return cast(list[tuple[str, Tensor]], pickle.loads(written))
