"""What the MLP of a decoder layer takes in memory: one for all tokens, or a mixture of experts (`models.experts`).

Counted in numbers, of the type of the weights; what is float32 or an index is small beside them and left out. Every
layer of a model with experts is counted with experts, even if its config gives some layers an MLP for all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from fovea.plan.model_sizes import ModelSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpNumbers:
    """Numbers of one layer."""

    saved: int
    """Per token, what autograd keeps after the norm: outputs of the first products, and the activations of them."""
    kept: int
    """Per token, outputs of matrix products, which selective checkpointing keeps."""
    kept_in_saved: int
    """Those of them that autograd keeps anyway."""
    forward: int
    """Per token, what exists at once without autograd."""
    backward: int
    """Per token, gradients at the backward pass of the activation beyond what they take the place of."""
    weight: int
    """Of the gradient of the largest weight, before it is added to that of the micro-batches before."""


def mlp_numbers(sizes: ModelSizes) -> MlpNumbers:
    """The numbers of a layer of this model."""
    width, text, active = sizes.width, sizes.text, sizes.decoder.experts_per_token
    if not active:
        inner = int(text.intermediate_size)
        # gate, its activation, the other half, their product; three gradients in place of one of these
        return MlpNumbers(
            saved=4 * inner,
            kept=width + 2 * inner,
            kept_in_saved=2 * inner,
            forward=3 * inner,
            backward=2 * inner,
            weight=width * inner,
        )
    inner, copies = active * int(text.moe_intermediate_size), active * width
    # a token's state is copied for each of its experts, and the product is kept before and after it is weighted
    return MlpNumbers(
        saved=copies + 5 * inner,
        kept=int(text.num_experts) + copies + 2 * inner,
        kept_in_saved=2 * inner,
        forward=2 * copies + 3 * inner,
        backward=2 * inner + copies,
        weight=_expert_weights(sizes) * 2 // 3,
    )


def expert_weights(sizes: ModelSizes) -> int:
    """Numbers in the experts of all layers; 0 without experts."""
    return sizes.decoder.num_layers * _expert_weights(sizes) if sizes.decoder.experts_per_token else 0


def _expert_weights(sizes: ModelSizes) -> int:
    return 3 * int(sizes.text.num_experts) * sizes.width * int(sizes.text.moe_intermediate_size)
