"""Memory of a rollout by the embedded engine: its peak, and what it keeps for the update (decision 005)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from fovea.config.run import Config
from fovea.models.vision.tower_inputs import graph_bytes
from fovea.rollout.embedded.dense_cache import FIRST_TOKENS
from fovea.rollout.embedded.paged_cache import GROWTH_TOKENS, MAX_ROWS
from fovea.rollout.embedded.prefill import PASS_TOKENS
from fovea.rollout.embedded.tuning import ONEDNN_LIMITS
from fovea.wiring.engine import records_linears, records_rollouts
from fovea_tools.plan.activations import FLOAT, Bytes, Numerics, expert_weights, mlp_numbers
from fovea_tools.plan.engine import CACHE, batch_tokens, embedded_engine, token_bytes
from fovea_tools.plan.model_sizes import ModelSizes
from fovea_tools.plan.vision import VISION, encoding_bytes, feature_bytes, pixels_of_patch, tower_shape, tower_stages
from fovea_tools.plan.workload import Lengths, Workload

PASSES, COPIES, STATES = "prefill and decoding", "decode copies", "states of delta nets"
SAMPLING_COPIES = 3
"""Number of float32 tensors [rows, vocabulary] while a token is sampled: logits, log-probs and probabilities."""


TAPE = "recorded outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Bytes that stay in memory from the rollout to the end of its update."""

    bytes: Bytes = field(default_factory=Counter)
    vision_graph: bool = False
    """True if the update backpropagates through the rollout's vision graph, and does not encode the images again."""


def recorded_bytes(config: Config, sizes: ModelSizes, work: Workload, ranks: int, numerics: Numerics) -> Recorded:
    """Bytes that a single process records; on CUDA only the vision graph, and nothing with several ranks."""
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
        # memory pages that were never written take no memory
        held[TAPE] = prompts * (lengths.prompt_tokens + completions * (lengths.completion_tokens - 1)) * token_bytes
    elif graph_estimate > limit:
        return Recorded()
    if graph_estimate:
        held[VISION] = sum(
            stage.saved for stage in tower_stages(config.train.gradient_checkpointing, sizes, patches, numerics)
        )
    return Recorded(bytes=held, vision_graph=graph_estimate > 0)


def _graph_estimate(config: Config, sizes: ModelSizes, patches: int, numerics: Numerics) -> int:
    """Bytes of the vision graph, as the engine estimates them to decide (`QwenFastPath.activation_bytes`)."""
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
    """Bytes on the tape per token: outputs of all linear layers (`VLM.linear_widths`); 0 with experts or delta nets."""
    shape = sizes.decoder
    if shape.experts_per_token or shape.delta is not None:
        return 0
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return shape.num_layers * (heads + 2 * sizes.width + 2 * int(sizes.text.intermediate_size)) * numerics.width


def rollout_peak(config: Config, sizes: ModelSizes, work: Workload, numerics: Numerics, recorded: Recorded) -> Bytes:
    """Bytes by part at the peak of a rollout, without those that are held in all phases."""
    prompts = admitted_prompts(config, work, numerics)
    rows = prompts * config.rollout.samples_per_prompt
    held = recorded.bytes.copy()
    held[CACHE] = cache_bytes(config, sizes, work, numerics)
    if sizes.decoder.delta is not None:
        # a decode step also holds the new states of one layer, which are small and not counted
        held[STATES] = rows * sizes.decoder.delta.state_bytes(numerics.width)
    held[COPIES] = decode_copies(sizes, rows, numerics)
    held[PASSES] = max(_prefill_bytes(sizes, work, prompts, numerics), _sampling_bytes(sizes, prompts, rows, numerics))
    images = prompts * work.lengths.images
    features = feature_bytes(sizes, images * work.lengths.image_tokens, numerics)
    # a trained tower encodes the images of a batch of prompts together before prefill, a frozen one image by image
    together = images if sizes.trains_vision else min(images, 1)
    # a recorded graph already holds what its pass needs, unless its blocks are checkpointed
    kept = recorded.vision_graph and config.train.gradient_checkpointing == "none"
    encoding = 0 if kept else encoding_bytes(sizes, together * work.lengths.patches, numerics)
    if encoding > held[PASSES] + held[CACHE] + held[COPIES] + features:
        return recorded.bytes + Counter({VISION: encoding, CACHE: pool_bytes(config, sizes, numerics)})
    held[VISION] += features
    return held


def admitted_prompts(config: Config, work: Workload, numerics: Numerics) -> int:
    """Largest number of prompts whose completions run at the same time on one engine, admitted at the start."""
    rollout = config.rollout
    if not numerics.cuda or work.lengths.state_tokens:  # a dense cache admits by the worst case
        return _that_fit(config, work, prompt_demand(config, work.lengths))
    room = min(GROWTH_TOKENS, rollout.max_new_tokens)
    fitting = _that_fit(config, work, work.lengths.prompt_tokens + rollout.samples_per_prompt * room)
    return max(1, min(fitting, MAX_ROWS // rollout.samples_per_prompt))


def running_prompts(config: Config, work: Workload, numerics: Numerics) -> int:
    """Average number of prompts whose completions run at the same time; on CUDA each is then half decoded."""
    if not numerics.cuda or work.lengths.state_tokens:
        return admitted_prompts(config, work, numerics)
    lengths = work.lengths
    drawn = config.rollout.samples_per_prompt * lengths.completion_tokens // 2
    fitting = _that_fit(config, work, lengths.prompt_tokens + drawn)
    return min(fitting, admitted_prompts(config, work, numerics))


def _that_fit(config: Config, work: Workload, prompt_tokens: int) -> int:
    """Number of an engine's prompts that fit its cache, if each takes `prompt_tokens` with its completions."""
    return max(1, min(work.rank_prompts, batch_tokens(config) // prompt_tokens))


def prompt_demand(config: Config, lengths: Lengths) -> int:
    """Cache tokens of a prompt with its completions; an engine with a smaller max_batch_tokens refuses the prompt."""
    return lengths.prompt_tokens + config.rollout.samples_per_prompt * (
        config.rollout.max_new_tokens + lengths.state_tokens
    )


def cache_bytes(config: Config, sizes: ModelSizes, work: Workload, numerics: Numerics) -> int:
    """Bytes of the key-value cache: a pool of pages, or dense buffers that grow by doubling."""
    if pool := pool_bytes(config, sizes, numerics):
        return pool
    lengths, rollout = work.lengths, config.rollout
    prompts = admitted_prompts(config, work, numerics)
    room = min(FIRST_TOKENS, rollout.max_new_tokens)
    while room < min(lengths.completion_tokens, rollout.max_new_tokens):
        room = min(2 * room, rollout.max_new_tokens)
    tokens = prompts * (lengths.prompt_tokens + rollout.samples_per_prompt * room)
    return tokens * token_bytes(sizes, numerics)


def pool_bytes(config: Config, sizes: ModelSizes, numerics: Numerics) -> int:
    """Bytes of the pool of pages, which exists for a whole rollout; 0 on a CPU and with delta nets."""
    has_pool = numerics.cuda and sizes.decoder.delta is None
    return batch_tokens(config) * token_bytes(sizes, numerics) if has_pool else 0


def decode_copies(sizes: ModelSizes, rows: int, numerics: Numerics) -> int:
    """Bytes of oneDNN's copies of all weights except the experts', used on a CPU with few rows."""
    limits = ONEDNN_LIMITS[torch.float32 if numerics.width == FLOAT else torch.bfloat16]
    uses = not numerics.cuda and limits.allow(rows, sizes.width)
    return (sizes.language_weights - expert_weights(sizes)) * numerics.width if uses else 0


def _prefill_bytes(sizes: ModelSizes, work: Workload, prompts: int, numerics: Numerics) -> int:
    """Bytes of all prompts' states before and after the layers, and of one pass in its MLP or its attention."""
    shape = sizes.decoder
    whole = prompts * work.lengths.prompt_tokens
    tokens = min(PASS_TOKENS, whole)
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    in_mlp = 2 * sizes.width + mlp_numbers(sizes).forward
    # queries, keys and values as projected, rotated, in blocks, and repeated for all heads, and the output
    in_attention = sizes.width + (queries + 2 * keys) + (queries + keys) + (queries + 2 * keys) + 2 * queries + queries
    passes = 2 if tokens < whole else 1
    return (passes * whole * sizes.width + tokens * max(in_mlp, in_attention)) * numerics.width


def _sampling_bytes(sizes: ModelSizes, prompts: int, rows: int, numerics: Numerics) -> int:
    """Bytes of the prompts' logits, which completions share, and of the tensors to sample the first tokens from."""
    raw = numerics.width if numerics.width < FLOAT else 0
    return sizes.vocabulary * (prompts * (FLOAT + raw) + rows * SAMPLING_COPIES * FLOAT)
