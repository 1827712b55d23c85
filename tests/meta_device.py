"""Torch's meta device in place of a GPU: what the host or the device would wait for there is counted, or an error.

Kernels run only by their shapes, those of CUDA in place of those of CPUs, and the meta device has no numbers: as on a
GPU, whatever the host reads of a tensor must be copied first. So a read is an error by itself, unless it is within
`PretendedDevice`, which counts it and answers with ones. What the device would wait for are copies of the host's
pageable memory. Operators that are given tensors of both devices are errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import currentframe
from itertools import repeat
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fovea.models.transfer import copy_pinned, to_device
from fovea.utils.host_waits import host_waits

META = torch.device("meta")
MAKES_TENSORS, COPIES = (torch.tensor, torch.as_tensor), (Tensor.to, Tensor.copy_)
READS: Mapping[Any, str] = {
    getattr(Tensor, name): name
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")
}
"""Methods that copy a tensor to the host, which waits for it."""
BY_VALUE = (Tensor.nonzero, torch.nonzero, Tensor.unique, torch.unique, torch.equal, Tensor.equal)
"""Functions whose results have as many numbers as their inputs' values say: the host must know them."""


class NoPageableCopies(TorchFunctionMode):
    """AssertionError at a copy from the host to the device that does not go through `models.transfer`."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in MAKES_TENSORS or (func in COPIES and args[-1 if func is Tensor.copy_ else 0].device.type == "cpu"):
            assert out.device != META or _is_called_from(to_device, copy_pinned), (
                f"{func.__name__} of {tuple(out.shape)} numbers"
            )
        return out


class PretendedDevice(NoPageableCopies):
    """The meta device as one whose tensors can be read: counts the reads, and answers each with ones.

    `truths` answer the reads of boolean tensors instead. AssertionError at pageable copies, at operators on tensors of
    both devices, and at its end if a read of Fovea's is not in the metric (`utils.host_waits`).
    """

    def __init__(self, truths: Iterator[bool] = repeat(True)) -> None:  # noqa: B008 (it is endless)
        super().__init__()
        self._truths = truths
        self.waits: Counter[str] = Counter()
        """Reads by the line of Fovea that made them."""
        self._one_device = _OneDevice()

    def __enter__(self) -> PretendedDevice:
        self._counted_before = host_waits()
        self._one_device.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._one_device.__exit__(*error)
        if error[0] is None:
            counted = host_waits() - self._counted_before
            assert counted == self.waits.total() - self.waits["outside"], f"{counted} counted of {self.waits}"

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = args[0] if args else None
        if isinstance(given, Tensor) and given.device == META:
            if func in READS or (func is Tensor.to and _is_to_host(args, kwargs)):
                self.waits[_place()] += 1
                answer = torch.full(
                    given.shape, next(self._truths) if given.dtype == torch.bool else 1, dtype=given.dtype
                )
                return answer if func in (Tensor.cpu, Tensor.to) else func(answer, *args[1:], **(kwargs or {}))
            if func in BY_VALUE:
                self.waits[_place()] += 1
                raise AssertionError(f"{func.__name__} reads the device: {_place()}")
        if func is Tensor.copy_ and given is not None and given.device != META and args[1].device == META:
            self.waits[_place()] += 1
            return given.fill_(1)
        return super().__torch_function__(func, types, args, kwargs)


class _OneDevice(TorchDispatchMode):
    """AssertionError at an operator on a tensor of the host beside one of the device; single numbers may be both."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        devices = {x.device.type for x in _tensors((args, kwargs or {})) if x.ndim}
        if len(devices) > 1 and "copy" not in func.__name__:
            raise AssertionError(f"{func} on tensors of {' and '.join(sorted(devices))}: {_place()}")
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _is_to_host(args: Sequence[Any], kwargs: dict[str, Any] | None) -> bool:
    wanted = [x for x in (*args[1:], *(kwargs or {}).values()) if isinstance(x, str | torch.device)]
    return any(torch.device(x).type == "cpu" for x in wanted)


def _place() -> str:
    """The innermost line of Fovea, as file:line."""
    frame: FrameType | None = currentframe()
    while frame is not None and "/fovea/" not in frame.f_code.co_filename.replace(str(Path(__file__).parents[1]), ""):
        frame = frame.f_back
    return "outside" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_called_from(*functions: Callable[..., object]) -> bool:
    codes = [function.__code__ for function in functions]  # type: ignore[attr-defined]
    frame: FrameType | None = currentframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None
