"""Memory that autograd keeps of a gated delta net in an update.

The rule's tensors are counted in a pass over tensors without memory, by the plain torch functions of transformers: an
upper bound where the kernels of flash-linear-attention run.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fovea.models.delta_rule import DeltaInputs, DeltaShape, DeltaState, delta_rule
from fovea.models.transformers_versions import plain_delta_functions

FLOAT = 4


def saved_by_net(shape: DeltaShape, tokens: int, width: int) -> int:
    """Bytes that autograd keeps of a layer's rule, gate and gated norm; `width` is the bytes of an activation."""
    values, beside = shape.widths[2], 2 * shape.value_heads
    # in float32: normalised outputs, and the gate before and after its activation; then weighted outputs, and their
    # product with the gate
    gated = tokens * values * (3 * FLOAT + 2 * width)
    return saved_by_rule(shape, tokens, width) + gated + tokens * beside * (2 * FLOAT + width)


@lru_cache(maxsize=64)
def saved_by_rule(shape: DeltaShape, tokens: int, width: int) -> int:
    """Bytes that autograd keeps of the rule over so many tokens of a row."""
    kept: dict[int, torch.UntypedStorage] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta", requires_grad=True)

    dtype = torch.float32 if width == FLOAT else torch.bfloat16
    inputs = DeltaInputs(
        mixed=empty(1, tokens, sum(shape.widths), dtype=dtype),
        log_decay=empty(1, tokens, shape.value_heads),
        beta=empty(1, tokens, shape.value_heads, dtype=dtype),
        conv_CK=empty(sum(shape.widths), shape.window, dtype=dtype),
    )
    with saved_tensors_hooks(count, lambda tensor: tensor):
        delta_rule(inputs, DeltaState.zeros(1, shape, inputs.mixed), shape, plain_delta_functions())
    return sum(storage.nbytes() for storage in kept.values())
