"""Memory of a GPU under `train.backend=megatron`: its slice of the model, its optimizer's states, and an update's peak.

Layers are split over the tensor axis and divided into pipeline stages, experts are distributed whole, and each GPU of
the first stage holds the whole vision tower. Gradients are summed in float32 buffers that are allocated at the start;
float32 weights and moments are sharded over the shares (`train.megatron.optimizer`). Activations are counted as in
`plan.activations`: on CUDA for Transformer Engine's layers (a fused norm saves its input and output, a fused SwiGLU its
input), on a CPU for layers in plain torch.

Sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fovea.config.backends import MegatronBackend
from fovea.config.run import Config
from fovea.train.loss import can_precompute_gradients
from fovea_tools.plan import states
from fovea_tools.plan.activations import (
    ACTIVATIONS,
    FLOAT,
    LOGITS,
    Bytes,
    ModuleBytes,
    Numerics,
    PassStage,
    expert_weights,
    mlp_numbers,
    norms_heads,
    peak_of,
    stage_of,
)
from fovea_tools.plan.model_sizes import ModelSizes, Unit
from fovea_tools.plan.states import GRADIENTS, MOMENTS, OPTIMIZER, PARAMETERS, REFERENCE, States
from fovea_tools.plan.vision import VISION, encoding_bytes, tower_stages
from fovea_tools.plan.workload import Roles, RowShape, Workload


@dataclass(frozen=True, slots=True)
class Slice:
    """Parameter counts of one GPU."""

    total: int = 0
    trainable: int = 0
    trained_experts: int = 0
    """Trained parameters of experts, which are sharded over different GPUs than the rest."""

    def __add__(self, other: Slice) -> Slice:
        return Slice(
            self.total + other.total, self.trainable + other.trainable, self.trained_experts + other.trained_experts
        )


def backend_of(config: Config) -> MegatronBackend:
    """Settings of the Megatron backend, for a caller that knows that the run uses it."""
    backend = config.train.backend
    assert isinstance(backend, MegatronBackend), backend.name
    return backend


def held_states(config: Config, sizes: ModelSizes, roles: Roles, numerics: Numerics) -> States:
    """Bytes that a GPU of a pipeline stage holds in all phases, without its engine."""
    backend, mine = backend_of(config), slice_of(config, sizes, roles)
    dense = FLOAT * optimizer_numbers(numerics) * (mine.trainable - mine.trained_experts) // roles.shares
    of_experts = roles.trainers // (roles.stages * backend.expert_parallel_size)
    experts = FLOAT * optimizer_numbers(numerics) * mine.trained_experts // of_experts
    stay = Counter({PARAMETERS: mine.total * numerics.width, GRADIENTS: FLOAT * mine.trainable})
    if config.copies_reference:
        stay[REFERENCE] = mine.total * numerics.width
    states = Counter({OPTIMIZER: dense + experts})
    return States(stay, states) if backend.optimizer_offload and numerics.cuda else States(stay + states, Counter())


def states_of_trainer(config: Config, sizes: ModelSizes, roles: Roles, numerics: Numerics) -> States:
    """Bytes that a training process of any backend holds in all phases, without its engine."""
    if roles.is_divided:
        return held_states(config, sizes, roles, numerics)
    return states.held_states(config, sizes, roles.trainers, numerics)


def optimizer_numbers(numerics: Numerics) -> int:
    """Float32 numbers that the optimizer holds per trained weight: the moments, and a copy of a 16-bit weight."""
    return MOMENTS + (numerics.width < FLOAT)


def slice_of(config: Config, sizes: ModelSizes, roles: Roles) -> Slice:
    """Parameter counts of a GPU of this stage."""
    return sum(_parts(config, sizes, roles), Slice())


def _parts(config: Config, sizes: ModelSizes, roles: Roles) -> Iterator[Slice]:
    tensor, last = backend_of(config).tensor_parallel_size, roles.stages - 1
    layers = sizes.of("language")
    per_stage = len(layers) // roles.stages
    for layer in layers[roles.stage * per_stage :][:per_stage]:
        yield _layer(config, sizes, layer)
    (root,) = sizes.of("root")
    matrix = sizes.vocabulary * sizes.width
    # a tied head in another stage is a copy of the embedding
    split = [roles.stage == 0, roles.stage == last and not (sizes.tied and last == 0)]
    for is_here in split:
        yield Slice(matrix // tensor, matrix // tensor * sizes.head_trains) if is_here else Slice()
    if roles.stage == last:
        yield Slice(sizes.width, sizes.width * sizes.head_trains)  # the last norm
    if roles.stage == 0:
        text = matrix * (1 if sizes.tied else 2) + sizes.width
        yield Slice(root.total - text, root.trainable - text * sizes.head_trains)
        yield from (Slice(block.total, block.trainable) for block in sizes.of("vision"))


def _layer(config: Config, sizes: ModelSizes, layer: Unit) -> Slice:
    """The slice of a decoder layer: matrices are split, experts are distributed, norms and the router are whole."""
    backend, shape = backend_of(config), sizes.decoder
    experts = expert_weights(sizes) // shape.num_layers
    whole = 2 * sizes.width + (2 * shape.head_dim if norms_heads(sizes) else 0)
    if experts:
        whole += int(sizes.text.num_experts) * sizes.width
    matrices = (layer.total - experts - whole) // backend.tensor_parallel_size
    mine = experts // backend.expert_parallel_size
    if config.model.lora is not None:
        return Slice(matrices + whole + mine, layer.trainable // backend.tensor_parallel_size)
    frozen = layer.total - layer.trainable  # the router, if it is frozen
    return Slice(matrices + whole + mine, matrices + whole - frozen + mine, mine)


def update_peak(config: Config, sizes: ModelSizes, work: Workload, roles: Roles, numerics: Numerics) -> Bytes:
    """Bytes by part at the peak of an update, without those that are held in all phases."""
    # 1F1B schedule: a stage holds the activations of one micro-batch for itself and of one for each later stage
    in_flight = min(roles.stages - roles.stage, work.rows_per_minibatch)
    peaks = [_row_peak(config, sizes, row, roles, numerics, in_flight) for row in work.distinct_rows]
    # offloaded states return to the GPU for the optimizer's step, when no activations are left
    step = held_states(config, sizes, roles, numerics).on_host
    return max(*peaks, step, key=lambda peak: peak.total())


def _row_peak(
    config: Config, sizes: ModelSizes, row: RowShape, roles: Roles, numerics: Numerics, in_flight: int
) -> Bytes:
    stages = row_stages(config, sizes, row, roles, numerics)
    waiting = Counter[str]()
    for stage in stages:
        waiting[stage.part] += (in_flight - 1) * stage.saved
    return peak_of(stages, gradients_part=GRADIENTS, gradients_held=True) + waiting


def row_stages(config: Config, sizes: ModelSizes, row: RowShape, roles: Roles, numerics: Numerics) -> list[PassStage]:
    """The modules of a pipeline stage in the order of their forward pass; `held_states` counts their gradients."""
    how, layer = config.train.gradient_checkpointing, layer_bytes(config, sizes, row, numerics)
    layers = [stage_of(how, ACTIVATIONS, layer, gradient=0)] * (sizes.decoder.num_layers // roles.stages)
    before = _first_stage(sizes, row, numerics) if roles.stage == 0 else []
    after = [head_stage(config, sizes, row, numerics)] if roles.stage == roles.stages - 1 else []
    return [*before, *layers, *after]


def _first_stage(sizes: ModelSizes, row: RowShape, numerics: Numerics) -> list[PassStage]:
    """The stages of the embedding and the vision tower; features of a frozen tower are not cached."""
    stream = row.tokens * sizes.width * numerics.width
    embedding = PassStage(part=ACTIVATIONS, saved=0, forward=2 * stream, backward=stream)
    if not sizes.trains_vision:
        encoding = encoding_bytes(sizes, row.patches, numerics) if row.patches else 0
        return [embedding, PassStage(part=VISION, saved=0, forward=encoding)]
    # only decoder layers are recomputed
    tower = tower_stages("none", sizes, row.patches, numerics)
    return [embedding, *(replace(stage, gradient=0) for stage in tower)]


def layer_bytes(config: Config, sizes: ModelSizes, row: RowShape, numerics: Numerics) -> ModuleBytes:
    """Bytes of a decoder layer on one GPU."""
    backend, shape, width, mlp = backend_of(config), sizes.decoder, numerics.width, mlp_numbers(sizes)
    tensor = backend.tensor_parallel_size
    # between the split layers, each GPU holds all tokens, or a part of them with sequence parallelism
    outside = row.tokens // tensor if backend.sequence_parallel else row.tokens
    queries, keys = (heads * shape.head_dim // tensor for heads in (shape.num_heads, shape.num_kv_heads))
    norm = (2 if numerics.cuda else 3) * sizes.width * width
    # the joined projection (values are a view of it), rotated queries and keys, cosines and sines of both, and the
    # output
    heads = (queries + 2 * keys + queries + keys + 4 * shape.head_dim + queries) * width
    if norms_heads(sizes) and not numerics.cuda:
        heads += (queries + keys) * (FLOAT + width)
    if not numerics.cuda:
        # keys and values repeated for each query head, and the joined outputs of the rows
        heads += 3 * queries * width
    tokens_of_mlp, parts = (outside, 1) if shape.experts_per_token else (row.tokens, tensor)
    saved_mlp = mlp.saved - (_inner(sizes) if numerics.cuda else 0)
    saved = outside * 2 * norm + row.tokens * heads + tokens_of_mlp * saved_mlp * width // parts
    backward = tokens_of_mlp * (mlp.backward * width) // parts + outside * sizes.width * width
    return ModuleBytes(
        entry=outside * sizes.width * width,
        saved=saved,
        backward=max(backward, row.tokens * (2 * queries + 2 * keys) * width),
        kept=0,  # the backend refuses `selective`
        kept_in_saved=0,
    )


def _inner(sizes: ModelSizes) -> int:
    """Inner width of a layer's MLP, summed over the experts of a token."""
    active = sizes.decoder.experts_per_token
    return active * int(sizes.text.moe_intermediate_size) if active else int(sizes.text.intermediate_size)


def head_stage(config: Config, sizes: ModelSizes, row: RowShape, numerics: Numerics) -> PassStage:
    """The stage of the last norm and of log-probs over a vocabulary slice (`train.megatron.sharded_logprobs`)."""
    backend, width = backend_of(config), numerics.width
    chunk = min(row.actions, max(1, int(backend.logits_mib * 2**20 / (FLOAT * sizes.vocabulary))))
    block = chunk * sizes.vocabulary // backend.tensor_parallel_size
    # Megatron returns the hidden states of the last stage in float32
    states = row.tokens * sizes.width * FLOAT
    saved = row.tokens * sizes.width * width * (2 if width < FLOAT else 1) + row.actions * sizes.width * width
    of_weight = sizes.vocabulary * sizes.width // backend.tensor_parallel_size * FLOAT if sizes.head_trains else 0
    # logits in the weights' dtype are converted to float32, and probabilities are another tensor
    logits = (2 * FLOAT + (width if width < FLOAT else 0)) * block
    if chunk == row.actions:
        backward = states + max(FLOAT * block, of_weight)
        return PassStage(part=LOGITS, saved=saved + FLOAT * block, forward=logits + states, backward=backward)
    known = all(can_precompute_gradients(config.algorithm, on_policy=each) for each in (True, False))
    if known:
        made = row.actions * sizes.width * width + of_weight
        return PassStage(part=LOGITS, saved=saved, forward=logits + states + made, backward=states + made)
    return PassStage(part=LOGITS, saved=saved, forward=logits + states, backward=logits + states + of_weight)
