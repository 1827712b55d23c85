"""Gradient checkpointing (Chen et al., arXiv 1604.06174): the backward pass recomputes activations.

`full` keeps the input of each decoder layer and trained vision block and recomputes the rest. `selective` also keeps
the outputs of attention and of linear layers, so that only norms, rotary positions, activation functions and LoRA's
additions are recomputed. The same operations run again on the same inputs, so gradients do not change by a bit.
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
"""Operators whose outputs `selective` keeps: linear layers, experts, and fused attention under all its names on CPU and
CUDA. The scores of plain attention formulas are not kept: they are larger than all kept outputs together."""


def recompute_activations(network: PreTrainedModel, how: Recompute) -> None:
    """Set gradient checkpointing for the fast path; call it after `trainable.choose_trainable`."""
    if how == "none":
        return
    recompute_plainly(network, how)
    for layer in language_model(network).layers:
        # `models.trained_layer` checkpoints decoder layers; transformers would wrap them in a second checkpoint
        layer.gradient_checkpointing = False
        layer.recompute = partial(checkpoint, **_options(network))


def recompute_plainly(network: Any, how: Recompute) -> None:
    """Set gradient checkpointing for transformers' own forward passes."""
    if how == "none":
        return
    if how == "selective":
        # an attribute of the network, so that a copy of the model has a separate count
        network.kept_outputs = KeptOutputs()
    # transformers 5.23 renamed this method and warns about the old name, the only one in 5.17
    enable = getattr(network, "activation_checkpointing_enable", network.gradient_checkpointing_enable)
    enable(_options(network))
    # with adapters, transformers also makes all embeddings require gradients, which only reentrant checkpointing needs:
    # a frozen vision tower would keep its activations and run a backward pass
    disable_input_require_grads(network)
    for block in (block for module in vision_modules(network) for block in module.modules()):
        # without a backward pass nothing is recomputed, and kept outputs would never be used
        if isinstance(block, GradientCheckpointingLayer) and not any(x.requires_grad for x in block.parameters()):
            block.gradient_checkpointing = False


def kept_bytes(network: Any) -> int:
    """Bytes that selective checkpointing has kept in all forward passes of this network so far."""
    kept: KeptOutputs | None = getattr(network, "kept_outputs", None)
    return 0 if kept is None else kept.num_bytes


@dataclass(slots=True)
class KeptOutputs:
    """Chooses the outputs that selective checkpointing keeps, and counts their bytes."""

    num_bytes: int = 0
    """Bytes of all passes so far; autograd's hooks do not see these tensors, since the checkpoint holds them."""

    def contexts(self) -> tuple[Context, Context]:
        """Contexts for the forward pass of a layer and for its recomputation."""
        return selective_contexts(COSTLY, self._add)

    def _add(self, output: Any) -> None:
        outputs = output if isinstance(output, tuple | list) else (output,)
        self.num_bytes += sum(x.numel() * x.element_size() for x in outputs if isinstance(x, Tensor))


def _options(network: Any) -> dict[str, Any]:
    """Arguments of torch's `checkpoint`."""
    kept: KeptOutputs | None = getattr(network, "kept_outputs", None)
    return CHECKPOINT_OPTIONS | ({} if kept is None else {"context_fn": kept.contexts})
