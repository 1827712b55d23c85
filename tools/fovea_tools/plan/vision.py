"""Activation memory of the vision tower, whose blocks are transformers' own modules.

Axes: `P` patches, `w` width of the tower, `f` width of its MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

from fovea.models.recompute import Recompute
from fovea_tools.plan.activations import FLOAT, ModuleBytes, Numerics, PassStage, stage_of
from fovea_tools.plan.model_sizes import ModelSizes

VISION = "vision"


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerShape:
    """Sizes of a vision tower; bytes per patch and block follow from its widths."""

    depth: int
    width: int
    mlp_width: int
    heads: int
    wide: int
    """Saved vectors per patch as wide as the tower, in the weights' dtype."""
    mlp_wide: int
    """Saved vectors per patch as wide as the MLP, in the weights' dtype."""
    rms_norms: int
    """Vectors per patch as wide as the tower that RMS norms save."""
    mergers: int


def tower_shape(sizes: ModelSizes) -> TowerShape:
    """The shape of the tower of a Qwen-VL model or of a named family.

    Per patch, a block saves ten vectors as wide as the tower: the inputs and outputs of two layer norms (4), joined
    queries, keys and values (3), rotated queries and keys (2), and the attention's output (1). As wide as its MLP, it
    saves the activation's input and output; a quick GELU also saves a sigmoid, and a gated MLP saves gate, activation,
    other half and product. Gated towers have RMS norms.
    """
    vision, kind = sizes.vision, sizes.family.model_type
    mergers = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))
    width = int(vision.embed_dim if kind == "qwen2_vl" else vision.hidden_size)
    mlp_width = int(width * vision.mlp_ratio) if kind == "qwen2_vl" else int(vision.intermediate_size)
    if kind == "glm4v_moe":
        # Glm4vMoeVisionBlock
        mlp_width = int(vision.out_hidden_size)
    gated = kind in ("qwen2_5_vl", "mistral3", "glm4v_moe")
    return TowerShape(
        depth=int(vision.depth if hasattr(vision, "depth") else vision.num_hidden_layers),
        width=width,
        mlp_width=mlp_width,
        heads=int(vision.num_heads if hasattr(vision, "num_heads") else vision.num_attention_heads),
        wide=8 if gated else 10,
        mlp_wide=4 if gated else 3 if kind == "qwen2_vl" else 2,
        rms_norms=2 if gated else 0,
        mergers=mergers,
    )


def tower_stages(how: Recompute, sizes: ModelSizes, patches: int, numerics: Numerics) -> list[PassStage]:
    """Stages of the tower in training on this many patches; empty without patches, or if the tower is frozen.

    `how` is `train.gradient_checkpointing` as it applies to the tower.
    """
    if not patches or not sizes.trains_vision:
        return []
    tower = tower_shape(sizes)
    module, units = block_bytes(tower, patches, numerics), sizes.of("vision")
    entry = module.entry
    blocks = [stage_of(how, VISION, module, gradient=FLOAT * unit.trainable) for unit in units[: tower.depth]]
    others = sum(unit.trainable for unit in units[tower.depth :])
    merging = PassStage(
        part=VISION, saved=(1 + 3 * tower.mergers) * entry, forward=entry, backward=2 * entry, gradient=FLOAT * others
    )
    return [PassStage(part=VISION, saved=pixel_bytes(sizes, patches, numerics), forward=entry), *blocks, merging]


def block_bytes(tower: TowerShape, patches: int, numerics: Numerics) -> ModuleBytes:
    """Bytes of one block."""
    numbers = tower.wide * tower.width + tower.mlp_wide * tower.mlp_width
    norms = tower.rms_norms * tower.width * numerics.norm_saves
    # log-sum-exps of the attention, and mean and scale of two norms
    statistics = FLOAT * (tower.heads + 4)
    # gradients inside the MLP, less the tensors that are freed by then
    of_mlp, linears = (2, 2) if tower.mlp_wide == 4 else (1, 1)
    return ModuleBytes(
        entry=patches * tower.width * numerics.width,
        saved=patches * (numbers * numerics.width + norms + statistics),
        backward=patches * (of_mlp * tower.mlp_width + 2 * tower.width) * numerics.width,
        # queries, keys and values, attention, its projection and the MLP's two or three layers
        kept=patches * (6 * tower.width + linears * tower.mlp_width) * numerics.width,
        kept_in_saved=patches * (4 * tower.width + linears * tower.mlp_width) * numerics.width,
    )


def encoding_bytes(sizes: ModelSizes, patches: int, numerics: Numerics) -> int:
    """Peak bytes of a pass without gradients: pixels, the residual stream, and the tensors of the MLP or attention."""
    tower = tower_shape(sizes)
    in_mlp = 2 * tower.width + (3 if tower.mlp_wide == 4 else 2) * tower.mlp_width
    in_attention = 10 * tower.width
    return pixel_bytes(sizes, patches, numerics) + patches * max(in_mlp, in_attention) * numerics.width


def pixel_bytes(sizes: ModelSizes, patches: int, numerics: Numerics) -> int:
    """Bytes of processed pixels: float32 ones on a GPU (a CPU shares numpy's), and a copy for 16-bit weights."""
    copies = (FLOAT if numerics.cuda else 0) + (numerics.width if numerics.width < FLOAT else 0)
    return patches * pixels_of_patch(sizes) * copies


def pixels_of_patch(sizes: ModelSizes) -> int:
    """Number of values in a patch, over all its frames and channels."""
    vision = sizes.vision
    channels = vision.in_channels if hasattr(vision, "in_channels") else vision.num_channels
    return int(channels * getattr(vision, "temporal_patch_size", 1) * sizes.patch_px**2)


def feature_bytes(sizes: ModelSizes, visual_tokens: int, numerics: Numerics) -> int:
    """Bytes of image features: the embeddings, and Qwen3-VL's features for the first decoder layers."""
    return visual_tokens * sizes.width * numerics.width * tower_shape(sizes).mergers
