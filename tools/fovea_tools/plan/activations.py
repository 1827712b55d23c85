"""Activation memory of the language model in an update: tensors that autograd saves for a packed row, and temporaries.

The tensors are counted one by one from the code that runs (`models.decoder`, `models.trained_layer`, `models.kernels`,
`models.shared_prefix`, `models.token_logprobs`), with the method of Korthikanti et al., arXiv 2205.05198, section 4.1.
Our layers save other tensors than the paper's: RMS norms, gated MLPs, grouped queries, and flash attention without
dropout.

Sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fovea.config.run import Config
from fovea.models.delta_rule import DeltaInputs, DeltaShape, DeltaState, delta_rule
from fovea.models.recompute import Recompute
from fovea.models.transformers_versions import plain_delta_functions
from fovea.train.loss import can_precompute_gradients
from fovea_tools.plan.model_sizes import ModelSizes
from fovea_tools.plan.workload import BYTES_OF, RowShape

Bytes: TypeAlias = Counter[str]
"""Bytes by part of a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassStage:
    """A module that runs forward, and later backward."""

    part: str
    """Part of the plan to which its activations belong."""
    saved: int
    """Bytes from its forward pass that its backward pass reads."""
    forward: int = 0
    """Peak bytes of temporaries in its forward pass."""
    backward: int = 0
    """Peak bytes that its backward pass needs in addition to the saved ones."""
    gradient: int = 0
    """Bytes of the gradients of its weights."""
    pending: int = 0
    """Bytes of a gradient that is held until the end of the backward pass, or until another stage with the same weight
    (a tied embedding) adds its own."""


def peak_of(stages: Sequence[PassStage], *, gradients_part: str, gradients_held: bool) -> Bytes:
    """Bytes by part at the peak of a forward pass through the stages and a backward pass in reverse.

    A stage keeps its activations until its backward pass has run (Korthikanti et al., arXiv 2205.05198, section 4).
    Both of its passes need temporaries, and the gradients of its weights appear in its backward pass. Set
    `gradients_held` if an earlier micro-batch has already allocated all gradients.
    """
    moments: list[Bytes] = []
    held: Bytes = Counter()
    gradients = Counter({gradients_part: sum(stage.gradient for stage in stages)}) if gradients_held else Counter()
    for stage in stages:
        held[stage.part] += stage.saved
        moments.append(held + gradients + Counter({stage.part: stage.forward}))
    pending: Bytes = Counter()
    for stage in reversed(stages):
        if not gradients_held:
            gradients[gradients_part] += stage.gradient
        pending[gradients_part] += stage.pending
        moments.append(held + gradients + pending + Counter({stage.part: stage.backward}))
        held[stage.part] -= stage.saved
    return max(moments, key=lambda moment: moment.total())


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpNumbers:
    """Counts of the numbers that one layer's MLP keeps or computes, per token unless stated otherwise."""

    saved: int
    """Numbers that autograd saves after the norm: outputs of the first matrix products, and their activations."""
    kept: int
    """Outputs of matrix products, which selective checkpointing keeps."""
    kept_in_saved: int
    """The part of `kept` that autograd saves anyway."""
    forward: int
    """Numbers that exist at the same time in a forward pass without autograd."""
    backward: int
    """Gradients in the backward pass of the activation, less the saved tensors that are freed for them."""
    weight: int
    """Numbers in the largest weight's gradient (not per token), before it is added to earlier micro-batches'
    gradients."""


def mlp_numbers(sizes: ModelSizes) -> MlpNumbers:
    """Count the numbers of the MLP in one layer of this model."""
    width, text, active = sizes.width, sizes.text, sizes.decoder.experts_per_token
    if not active:
        inner = int(text.intermediate_size)
        # saved: the gate, its activation, the up projection and their product; in the backward pass, three gradients
        # replace one of these
        return MlpNumbers(
            saved=4 * inner,
            kept=width + 2 * inner,
            kept_in_saved=2 * inner,
            forward=3 * inner,
            backward=2 * inner,
            weight=width * inner,
        )
    inner, copies = active * int(text.moe_intermediate_size), active * width
    shared = int(getattr(text, "shared_expert_intermediate_size", 0))
    shared += getattr(text, "n_shared_experts", 0) * int(text.moe_intermediate_size)
    out = width + 1 if shared else 0
    # a token's state is copied for each of its experts, and the product is saved before and after it is weighted; the
    # gradients need both the shared expert's output and its weight
    return MlpNumbers(
        saved=copies + 5 * inner + 4 * shared + out,
        kept=num_experts(text) + copies + 2 * inner + 2 * shared + out,
        kept_in_saved=2 * inner + 2 * shared + out,
        forward=2 * copies + 3 * inner,
        backward=2 * inner + copies,
        weight=_expert_weights(sizes) * 2 // 3,
    )


def num_experts(text: Any) -> int:
    """Number of experts in a layer, from transformers' config of the language model."""
    return int(text.num_experts if hasattr(text, "num_experts") else text.n_routed_experts)


def expert_weights(sizes: ModelSizes) -> int:
    """Number of parameters in the experts of all layers; 0 for a model without experts."""
    return sizes.decoder.num_layers * _expert_weights(sizes) if sizes.decoder.experts_per_token else 0


def _expert_weights(sizes: ModelSizes) -> int:
    return 3 * num_experts(sizes.text) * sizes.width * int(sizes.text.moe_intermediate_size)


ACTIVATIONS, LOGITS = "activations", "logits and loss"
FLOAT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Storage format of numbers, and the device whose kernels compute them."""

    width: int
    """Bytes of a weight or an activation."""
    cuda: bool

    @staticmethod
    def of(config: Config, cuda: bool) -> Numerics:
        return Numerics(width=BYTES_OF[config.model.dtype], cuda=cuda)

    @property
    def norm_saves(self) -> int:
        """Bytes that an RMS norm saves per number: its input on CUDA, the normalised float32 number on a CPU."""
        return self.width if self.cuda else FLOAT


def decoder_stages(config: Config, sizes: ModelSizes, row: RowShape, numerics: Numerics) -> list[PassStage]:
    """A stage for each decoder layer; the last one computes only tokens that predict an action after attention."""
    units = sizes.of("language")
    outputs = [row.tokens] * (len(units) - 1) + [row.predictors]
    how = config.train.gradient_checkpointing
    layers = [
        _net_bytes(sizes, sizes.decoder.delta, row, numerics, number)
        if is_delta and sizes.decoder.delta is not None
        else _layer_bytes(sizes, row, numerics, number)
        for is_delta, number in zip(sizes.decoder.is_delta, outputs, strict=True)
    ]
    return [
        stage_of(how, ACTIVATIONS, layer, gradient=FLOAT * unit.trainable)
        for unit, layer in zip(units, layers, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleBytes:
    """Memory of a layer or block, which gradient checkpointing may recompute."""

    entry: int
    """Bytes of its input."""
    saved: int
    """Bytes that autograd saves."""
    backward: int
    """Bytes of temporaries in its backward pass, in addition to the saved ones."""
    kept: int
    """Bytes of outputs of its linear layers and of attention, which `selective` keeps (`models.recompute`)."""
    kept_in_saved: int
    """The part of `kept` that autograd saves anyway."""


def stage_of(how: Recompute, part: str, module: ModuleBytes, *, gradient: int) -> PassStage:
    """The stage of a layer or block; recomputed tensors exist only during its own backward pass."""
    saved, backward = module.saved, module.backward
    if how == "none":
        return PassStage(part=part, saved=saved, forward=3 * module.entry, backward=backward, gradient=gradient)
    if how == "full":
        return PassStage(part=part, saved=module.entry, forward=saved, backward=saved + backward, gradient=gradient)
    return PassStage(
        part=part,
        saved=module.entry + module.kept,
        forward=saved - module.kept_in_saved,
        backward=saved - module.kept_in_saved + backward,
        gradient=gradient,
    )


def _layer_bytes(sizes: ModelSizes, row: RowShape, numerics: Numerics, outputs: int) -> ModuleBytes:
    """Bytes of a decoder layer that computes only `outputs` of its tokens after attention."""
    shape, width, mlp = sizes.decoder, numerics.width, mlp_numbers(sizes)
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    norm = sizes.width * numerics.norm_saves + FLOAT
    # the tensors of the input norm, and its output, which the projections read
    before = row.tokens * (norm + sizes.width * width)
    if norms_heads(sizes):
        before += row.tokens * ((queries + keys) * numerics.norm_saves + FLOAT * (shape.num_heads + shape.num_kv_heads))
    if shape.delta is not None:
        # the activated gate, and its product with the attention's output
        before += 2 * row.tokens * queries * width
    # the input of the output projection, the norms after it, the output of the norm before the MLP, and the MLP
    norms = 3 if sizes.norms_outputs else 1
    after = outputs * (queries * width + norms * norm + (sizes.width + mlp.saved) * width)
    # in the backward pass of the activation, with the gradients of the residual stream and of one weight
    in_mlp = outputs * (mlp.backward + sizes.width) * width + mlp.weight * width
    attended = (2 if numerics.cuda else 3) * queries * row.tokens * width
    return ModuleBytes(
        entry=row.tokens * sizes.width * width,
        saved=before + _saved_by_attention(sizes, row, numerics) + after,
        backward=max(in_mlp, _attention_backward(sizes, row, numerics) - after),
        kept=row.tokens * (queries + 2 * keys) * width + attended + outputs * (sizes.width + mlp.kept) * width,
        kept_in_saved=outputs * mlp.kept_in_saved * width + row.tokens * queries * width,
    )


def _net_bytes(sizes: ModelSizes, net: DeltaShape, row: RowShape, numerics: Numerics, outputs: int) -> ModuleBytes:
    """Bytes of a layer with a gated delta net in place of attention."""
    width, mlp = numerics.width, mlp_numbers(sizes)
    norm = sizes.width * numerics.norm_saves + FLOAT
    inside = saved_by_net(net, row.block_tokens, width)
    after = outputs * (norm + (sizes.width + mlp.saved) * width)
    in_mlp = outputs * (mlp.backward + sizes.width) * width + mlp.weight * width
    # the delta rule's backward pass holds gradients of its inputs in float32, before and after their convolution
    in_net = 4 * FLOAT * row.block_tokens * sum(net.widths)
    projected = sum(net.widths) + net.widths[2] + 2 * net.value_heads
    return ModuleBytes(
        entry=row.tokens * sizes.width * width,
        saved=row.tokens * (norm + sizes.width * width) + inside + after,
        backward=max(in_mlp, in_net - after),
        kept=row.tokens * projected * width + outputs * (sizes.width + mlp.kept) * width,
        kept_in_saved=outputs * mlp.kept_in_saved * width + row.tokens * net.widths[2] * width,
    )


def _attention_backward(sizes: ModelSizes, row: RowShape, numerics: Numerics) -> int:
    """Bytes of temporaries in the backward pass of attention, when the later part of the layer is already freed."""
    shape, width = sizes.decoder, numerics.width
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    stream = 2 * row.tokens * sizes.width
    if numerics.cuda:
        return (stream + row.tokens * (2 * queries + 2 * keys) + 2 * row.keys * keys) * width
    # the gradient of the output, the gradients of queries, keys and values in padded blocks, and the same as packed
    # rows
    blocks = row.tokens * (4 * queries + 5 * keys)
    if width == FLOAT:
        return (stream + blocks) * width
    # with few queries the blocks are float32, next to the 16-bit gradients that they are copied from
    return FLOAT * blocks + (stream + row.tokens * (queries + keys)) * width


def _saved_by_attention(sizes: ModelSizes, row: RowShape, numerics: Numerics) -> int:
    shape, width = sizes.decoder, numerics.width
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    log_sums = FLOAT * shape.num_heads
    if not numerics.cuda:
        # padded blocks of queries, keys, values and outputs
        return row.block_tokens * ((2 * queries + 2 * keys) * width + log_sums)
    # float32 attention repeats the keys for all completions and query heads
    gathered = 2 * row.keys * (queries if width == FLOAT else keys) * width
    # the output is already counted as the input of the output projection
    return row.tokens * (queries * width + log_sums) + gathered


def norms_heads(sizes: ModelSizes) -> bool:
    """True if the queries and keys of each head are normalised."""
    fast = sizes.family.fast_path
    return bool(getattr(fast, "normed_heads", False))


def head_stage(config: Config, sizes: ModelSizes, row: RowShape, numerics: Numerics) -> PassStage:
    """The stage of the last norm, logits, log-probs and entropies (`models.token_logprobs.LogprobAndEntropy`)."""
    width, vocabulary = numerics.width, sizes.vocabulary
    chunk = min(row.actions, max(1, int(config.train.backend.logits_mib * 2**20 / (FLOAT * vocabulary))))
    recomputes = chunk < row.actions
    block = chunk * vocabulary
    norm = row.predictors * (sizes.width * numerics.norm_saves + FLOAT)
    states = row.actions * sizes.width * width
    probabilities = FLOAT * block
    # the head's gradient is summed in float32, and each product that is added to it is in 16 bits
    of_weight = vocabulary * sizes.width * FLOAT if sizes.head_trains else 0
    product = of_weight * width // FLOAT
    beside = product if width < FLOAT else 0
    # p log p, for the gradient of the entropy; after it, the gradient of the logits in 16 bits
    of_logits = max(FLOAT * block if config.algorithm.entropy_coef else 0, block * width if width < FLOAT else 0)
    known = all(can_precompute_gradients(config.algorithm, on_policy=each) for each in (True, False))
    if recomputes and config.train.backend.name == "torch" and known:
        # the forward pass computes the gradients while the chunk's logits and log-probs exist, and keeps them for the
        # backward pass, which computes none
        return PassStage(
            part=LOGITS,
            saved=norm + states,
            forward=2 * FLOAT * block + states + of_weight + beside,
            backward=0 if sizes.tied else of_weight,
            gradient=0 if sizes.tied else FLOAT * vocabulary * sizes.width * sizes.head_trains,
            pending=of_weight if sizes.tied else 0,
        )
    # gradients of later chunks are added to the first chunk's, which is held until then
    of_chunks = of_weight if recomputes else 0
    # logits and log-probs exist at the same time
    again = max(2 * FLOAT * block, probabilities + of_logits) if recomputes else of_logits
    return PassStage(
        part=LOGITS,
        saved=norm + states + (0 if recomputes else probabilities),
        forward=(2 if recomputes else 1) * FLOAT * block,
        backward=again + states + of_chunks + (0 if sizes.tied else product),
        gradient=0 if sizes.tied else FLOAT * vocabulary * sizes.width * sizes.head_trains,
        pending=of_weight if sizes.tied else 0,
    )


def embedding_stage(sizes: ModelSizes, row: RowShape, numerics: Numerics) -> PassStage:
    """The stage of the root's weights except the head; the embedding's gradient is first a dense matrix."""
    (root,) = sizes.of("root")
    of_head = 0 if sizes.tied else sizes.vocabulary * sizes.width * sizes.head_trains
    gradient = FLOAT * (root.trainable - of_head)
    dense = sizes.vocabulary * sizes.width * numerics.width if gradient else 0
    stream = row.tokens * sizes.width * numerics.width
    # cosines and sines of the positions
    rope = 3 * row.tokens * sizes.decoder.head_dim * numerics.width
    return PassStage(part=ACTIVATIONS, saved=rope, forward=2 * stream, backward=stream + dense, gradient=gradient)


def saved_by_net(shape: DeltaShape, tokens: int, width: int) -> int:
    """Bytes that autograd saves for a delta net's rule, gate and gated norm; `width` is the bytes of an activation."""
    values, beside = shape.widths[2], 2 * shape.value_heads
    # in float32 the normalised outputs, and the gate before and after its activation; in the activations' dtype the
    # weighted outputs, and their product with the gate
    gated = tokens * values * (3 * FLOAT + 2 * width)
    return saved_by_rule(shape, tokens, width) + gated + tokens * beside * (2 * FLOAT + width)


@lru_cache(maxsize=64)
def saved_by_rule(shape: DeltaShape, tokens: int, width: int) -> int:
    """Bytes that autograd saves for the delta rule over this many tokens of a row.

    They are counted in a pass over tensors of the meta device, with the plain torch functions of transformers: an upper
    bound where the kernels of flash-linear-attention run.
    """
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
