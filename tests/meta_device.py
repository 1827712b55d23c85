"""Torch's meta device in place of a GPU: what the host waits for there is an error here.

As on a GPU, whatever the host reads of a tensor (`item`, `tolist`, `nonzero`, `unique`) must be copied from the device
first, and the meta device has no numbers to copy. Kernels run by their shapes alone, those of CUDA in place of those of
CPUs. What the device would wait for are copies of the host's pageable memory: `NoPageableCopies` refuses those.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fovea.models.transfer import to_device

META = torch.device("meta")
MAKES_TENSORS, COPIES = (torch.tensor, torch.as_tensor), (Tensor.to, Tensor.copy_)


class NoPageableCopies(TorchFunctionMode):
    """AssertionError at a copy from the host to the device that does not go through `models.transfer`."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in MAKES_TENSORS or (func in COPIES and args[-1 if func is Tensor.copy_ else 0].device.type == "cpu"):
            assert out.device != META or _is_called_from(to_device), f"{func.__name__} of {tuple(out.shape)} numbers"
        return out


def _is_called_from(function: Callable[..., object]) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not function.__code__:  # type: ignore[attr-defined]
        frame = frame.f_back
    return frame is not None
