"""Gradient checkpointing (Chen et al., arXiv 1604.06174): activations that the backward pass computes again.

`full` keeps the input of each decoder layer and trained vision block and recomputes the rest. `selective` also keeps
the outputs of attention and of linear layers, so that only norms, rotary positions, activation functions and LoRA's
additions are recomputed. The same operations run again on the same inputs: gradients are those without it, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # registers `torch_attn`
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from fovea.models.modules import language_model, vision_modules
from fovea.models.torch_versions import CHECKPOINT_OPTIONS, Context, selective_contexts
from fovea.models.transformers_versions import disable_input_require_grads

Recompute = Literal["none", "full", "selective"]

COSTLY = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._grouped_mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
    }
)
"""Operators whose outputs `selective` keeps: linear layers, experts, and fused attention by all its names on CPU and
CUDA. The scores of plain attention formulas are not among them: they are larger than all that is."""


def recompute_activations(network: PreTrainedModel, how: Recompute) -> None:
    """Set gradient checkpointing of every decoder layer and trained vision block, for the fast path.

    What is trained must have been chosen before (`trainable.choose_trainable`).
    """
    if how == "none":
        return
    recompute_plainly(network, how)
    for layer in language_model(network).layers:
        # decoder layers are checkpointed by `models.trained_layer`; transformers would do so once more around it
        layer.gradient_checkpointing = False
        layer.recompute = partial(checkpoint, **_options(network))


def recompute_plainly(network: Any, how: Recompute) -> None:
    """Set gradient checkpointing by transformers' own forward passes."""
    if how == "none":
        return
    if how == "selective":
        # an attribute of the network, so that a copy of the model counts by itself
        network.kept_outputs = KeptOutputs()
    # transformers 5.23 renamed it and warns at the old name, 5.17 has only that
    enable = getattr(network, "activation_checkpointing_enable", network.gradient_checkpointing_enable)
    enable(_options(network))
    # with adapters, transformers also makes all embeddings require gradients, of which only reentrant checkpointing has
    # need: a frozen vision tower would keep its activations and run backward
    disable_input_require_grads(network)
    for block in (block for module in vision_modules(network) for block in module.modules()):
        # without a backward pass, nothing is computed again, and what is kept would be kept for nothing
        if isinstance(block, GradientCheckpointingLayer) and not any(x.requires_grad for x in block.parameters()):
            block.gradient_checkpointing = False


def kept_bytes(network: Any) -> int:
    """Bytes that selective checkpointing has kept in all forward passes of this network so far."""
    kept: KeptOutputs | None = getattr(network, "kept_outputs", None)
    return 0 if kept is None else kept.num_bytes


@dataclass(slots=True)
class KeptOutputs:
    """Choice of the outputs that selective checkpointing keeps, and their number of bytes."""

    num_bytes: int = 0
    """Bytes of all passes so far; autograd's hooks see none of these tensors, which the checkpoint itself holds."""

    def contexts(self) -> tuple[Context, Context]:
        """Contexts of the forward pass of a layer, and of its recomputation."""
        return selective_contexts(COSTLY, self._add)

    def _add(self, output: Any) -> None:
        outputs = output if isinstance(output, tuple | list) else (output,)
        self.num_bytes += sum(x.numel() * x.element_size() for x in outputs if isinstance(x, Tensor))


def _options(network: Any) -> dict[str, Any]:
    """Arguments of torch's `checkpoint`."""
    kept: KeptOutputs | None = getattr(network, "kept_outputs", None)
    return CHECKPOINT_OPTIONS | ({} if kept is None else {"context_fn": kept.contexts})
