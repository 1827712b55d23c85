"""Differences between torch 2.11 and 2.14, each of them behind one name.

The rest of the package uses these names and does not check versions. Each docstring says which lower bound of torch in
pyproject.toml makes the name unnecessary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Context = AbstractContextManager[Any]
T = TypeVar("T")

NAMES_SHARED_KEYS = "enable_gqa" in signature(varlen_attn).parameters
"""False for torch 2.11, whose kernels accept shared keys without an argument; remove it with torch>=2.12."""
PASSES_OUTPUTS = "op_output" in signature(SelectiveCheckpointContext).parameters
"""False for torch 2.11, whose selective-checkpointing policies do not get outputs; remove it with torch>=2.12."""


def shared_keys(query_NHD: Tensor, key_MJD: Tensor) -> dict[str, Any]:
    """Arguments of variable-length attention whose query heads may share key heads."""
    return {"enable_gqa": query_NHD.shape[1] != key_MJD.shape[1]} if NAMES_SHARED_KEYS else {}


def fsdp_output(record: type[T]) -> type[T]:
    """Class decorator for a dataclass that a sharded module returns; remove it with torch>=2.12.

    FSDP2 gathers weights for the backward pass by hooks on the tensors of an output. torch 2.11 finds these only in
    registered classes; otherwise the backward pass would read weights that have been freed.
    """
    torch.export.register_dataclass(record)
    return record


CHECKPOINT_OPTIONS: dict[str, Any] = {"use_reentrant": False} | (
    {"respect_saved_tensors_hooks": False} if "respect_saved_tensors_hooks" in signature(checkpoint).parameters else {}
)
"""Arguments of every gradient checkpoint. Hooks on saved tensors do not see what selective checkpointing keeps; torch
2.14 warns of that unless this argument is given. Give it unconditionally with torch>=2.14."""


def selective_contexts(operators: Collection[Any], note: Callable[[Any], None]) -> tuple[Context, Context]:
    """Contexts of a checkpointed forward pass and of its recomputation, which keep the outputs of these operators.

    `note` is called with each output that is kept.
    """

    def choose(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operator not in operators:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if PASSES_OUTPUTS:
            note(context.op_output)
        return CheckpointPolicy.MUST_SAVE

    forward, again = create_selective_checkpoint_contexts(choose)
    return forward if PASSES_OUTPUTS else _both(_Outputs(operators, note), forward), again


@contextmanager
def _both(outer: Context, inner: Context) -> Iterator[None]:
    with outer, inner:
        yield


class _Outputs(TorchDispatchMode):
    """Calls a function with each output of these operators."""

    def __init__(self, operators: Collection[Any], note: Callable[[Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators, self._note = operators, note

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        if operator in self._operators:
            self._note(out)
        return out
