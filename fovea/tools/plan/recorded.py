"""Bytes that a rollout leaves for its update (decision 005): the tape on a CPU, the vision graph anywhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fovea.config.run import Config
from fovea.models.vision.tower_inputs import graph_bytes
from fovea.tools.plan.activations import Numerics
from fovea.tools.plan.engine import embedded_engine
from fovea.tools.plan.model_sizes import ModelSizes
from fovea.tools.plan.vision import VISION, pixels_of_patch, tower_shape, tower_stages
from fovea.tools.plan.walk import Bytes
from fovea.tools.plan.workload import Workload
from fovea.wiring.engine import records_linears, records_rollouts

TAPE = "recorded outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Bytes that stay from the rollout to the end of its update."""

    bytes: Bytes = field(default_factory=Counter)
    vision_graph: bool = False
    """The update goes backward through the rollout's pass of the vision tower, and encodes no image again."""


def recorded_bytes(config: Config, sizes: ModelSizes, work: Workload, ranks: int, numerics: Numerics) -> Recorded:
    """Bytes that one process records: only the vision graph on CUDA, nothing on several ranks."""
    if ranks > 1 or not records_rollouts(config):
        return Recorded()
    limit = embedded_engine(config).reuse_gib * 2**30
    lengths, prompts = work.lengths, work.rank_prompts
    patches = prompts * lengths.images * lengths.patches
    graph_estimate = _graph_estimate(config, sizes, patches, numerics) if sizes.trains_vision else 0
    completions = config.rollout.samples_per_prompt
    tokens = prompts * (lengths.prompt_tokens + completions * config.rollout.max_new_tokens)
    records = records_linears(config, sizes.width) and not numerics.cuda
    token_bytes = _tape_bytes(sizes, numerics) if records else 0
    held: Bytes = Counter()
    if token_bytes and tokens * token_bytes + graph_estimate <= limit:
        # pages that nothing was written to take no memory
        held[TAPE] = prompts * (lengths.prompt_tokens + completions * (lengths.completion_tokens - 1)) * token_bytes
    elif graph_estimate > limit:
        return Recorded()
    if graph_estimate:
        held[VISION] = sum(
            stage.saved for stage in tower_stages(config.train.gradient_checkpointing, sizes, patches, numerics)
        )
    return Recorded(bytes=held, vision_graph=graph_estimate > 0)


def _graph_estimate(config: Config, sizes: ModelSizes, patches: int, numerics: Numerics) -> int:
    """The estimate by which the engine decides (`QwenFastPath.activation_bytes`)."""
    tower, recomputes = tower_shape(sizes), config.train.gradient_checkpointing == "full"
    blocks = tower.depth if config.model.trains_tower else 0
    return graph_bytes(
        patches,
        tower.width,
        numerics.width,
        trained_blocks=0 if recomputes else blocks,
        recomputed_blocks=blocks if recomputes else 0,
        mergers=tower.mergers,
        pixels=pixels_of_patch(sizes) if blocks else 0,
    )


def _tape_bytes(sizes: ModelSizes, numerics: Numerics) -> int:
    """Bytes on the tape of one token: outputs of all linear layers (`models.vlm.VLM.linear_widths`); 0 with experts."""
    shape = sizes.decoder
    if shape.experts_per_token or shape.delta is not None:
        return 0
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return shape.num_layers * (heads + 2 * sizes.width + 2 * int(sizes.text.intermediate_size)) * numerics.width
