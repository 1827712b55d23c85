"""The Qwen-VL families and their common base: visual tokens, M-RoPE positions, image tensors, the fast path.

Axes: `L` token ids, `N` patches of an image, `C` values of a patch, `V` visual tokens, 3 = time, height, width.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fovea.models.experts import Experts
from fovea.models.families.base import (
    AttentionModules,
    DeltaModules,
    FastPath,
    LayerModules,
    MlpModules,
    SharedExpertModules,
)
from fovea.models.flops import VisionWork, Work, text_work, vision_work
from fovea.models.transfer import to_device
from fovea.models.transformers_versions import (
    experts_per_token,
    experts_tensor,
    image_processor_class,
    tower_features,
    tower_options,
)
from fovea.models.varlen import HeadShape
from fovea.models.vision.feature_cache import ImageFeatures
from fovea.models.vision.tower_inputs import BlockCounts, graph_bytes, tower_heads, tower_inputs
from fovea.types import PositionRule, PromptImage
from fovea_gym.rows.images import Size

IMAGE_PAD = "<|image_pad|>"
PIXELS, GRID = "pixel_values", "image_grid_thw"
"""Names of an image's tensors: pixels, float32 [N, C], and numbers of patches in time, height and width, int64 [3]."""
VISION, LANGUAGE = "model.visual", "model.language_model"
ImageProcessor = image_processor_class("Qwen2VLImageProcessor")


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVL(ABC):
    """ModelFamily of a Qwen-VL model; subclasses give the FLOPs of the vision tower."""

    config: Any
    """transformers' config."""
    image_token_id: int
    merge_size: int
    """Number of patches along each side of a visual token."""
    model_type: ClassVar[str]
    video_processor: ClassVar[str]
    fast_path: ClassVar[FastPath]
    vision_paths: ClassVar[tuple[str, ...]] = (VISION,)
    projector_paths: ClassVar[tuple[str, ...]] = (f"{VISION}.merger",)
    language_path: ClassVar[str] = LANGUAGE

    @classmethod
    def of(cls, config: Any) -> QwenVL:
        """The family for a transformers config."""
        merge_size = config.vision_config.spatial_merge_size
        return cls(config=config, image_token_id=config.image_token_id, merge_size=merge_size)

    @property
    def work(self) -> Work:
        return text_work(self.config.text_config, self.vision_work(self.config.vision_config))

    @abstractmethod
    def vision_work(self, vision: Any) -> VisionWork:
        """Forward FLOPs of the vision tower with this config."""

    def load_image_processor(self, path: str, revision: str) -> Any:
        return ImageProcessor.from_pretrained(path, revision=revision)

    def image_options(self, image_processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        return {"size": pixel_limits(image_processor.size, min_pixels, max_pixels)}

    def fewest_tokens(self, image_processor: Any, size: Size, options: Mapping[str, Any]) -> int:
        width, height = size
        limits = {"min_pixels": options["size"]["shortest_edge"], "max_pixels": options["size"]["longest_edge"]}
        patches: int = image_processor.get_number_of_image_patches(height, width, limits)
        return patches // self.merge_size**2

    def prompt_image(self, processed: Mapping[str, Any]) -> PromptImage:
        pixels_NC = np.ascontiguousarray(processed[PIXELS], dtype=np.float32)
        grid = np.asarray(processed[GRID][0], dtype=np.int64)
        # images with the same patches in another grid are different images
        key = hashlib.blake2b(pixels_NC.tobytes(), digest_size=16, person=f"{grid[1]}x{grid[2]}".encode()[:16])
        return PromptImage(
            key=key.hexdigest(),
            tensors={PIXELS: pixels_NC, GRID: grid},
            num_tokens=int(grid.prod()) // self.merge_size**2,
            grid=(int(grid[0]), int(grid[1]), int(grid[2])),
        )

    def box_frame(self, _image: PromptImage) -> tuple[int, int]:
        """Thousandths of the image's sides (Qwen2-VL, arXiv 2409.12191, section 2.2; Qwen3-VL likewise)."""
        return 1000, 1000

    def image_mark(self, _image_processor: Any) -> str:
        return IMAGE_PAD

    def image_text(self, image: PromptImage) -> str:
        return IMAGE_PAD * image.num_tokens

    def positions(
        self, token_ids_L: NDArray[np.int64], images: Sequence[PromptImage], start: int
    ) -> tuple[NDArray[np.int64], int]:
        return grid_positions(token_ids_L == self.image_token_id, images, start, self.merge_size)

    def forward_inputs(self, token_ids: Tensor, images: Sequence[PromptImage]) -> dict[str, Tensor]:
        if not images:
            return {}
        return {
            **{name: x.to(token_ids.device) for name, x in image_tensors(images).items()},
            "mm_token_type_ids": (token_ids == self.image_token_id).int(),
        }


def grid_positions(
    is_pad_L: NDArray[np.bool_], images: Sequence[PromptImage], start: int, merge_size: int
) -> tuple[NDArray[np.int64], int]:
    """M-RoPE positions [3, L] (Qwen2-VL, arXiv 2409.12191, section 2.1), equal to transformers' `get_rope_index`.

    Text positions increase by one on all axes. Visual tokens of an image share one position in time; their height and
    width follow the merged grid. Text after an image continues at the largest position so far plus one.
    """
    length = len(is_pad_L)
    if not images:
        return np.arange(start, start + length)[None].repeat(3, axis=0), start + length
    pads = np.flatnonzero(is_pad_L)
    assert len(pads) == sum(image.num_tokens for image in images), f"{len(pads)} pads for {len(images)} images"
    positions_3L = np.empty((3, length), dtype=np.int64)
    token, pad = 0, 0
    for image in images:
        first = int(pads[pad])
        positions_3L[:, token:first] = np.arange(start, start + first - token)
        start += first - token
        token, pad = first + image.num_tokens, pad + image.num_tokens
        time, height, width = image.grid
        merged = time, height // merge_size, width // merge_size
        np.add(_offsets(image.positions, *merged), start, out=positions_3L[:, first:token])
        start += image.num_tokens if image.positions == "sequence" else max(merged[1:])
    positions_3L[:, token:] = np.arange(start, start + length - token)
    return positions_3L, start + length - token


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenFastPath:
    """FastPath of a Qwen-VL model."""

    normed_heads: bool
    """True if queries and keys are normalised per head."""
    deepstack: bool
    """True if the vision tower also returns features for the first decoder layers."""

    def layer(self, module: Any) -> LayerModules:
        return LayerModules(
            input_norm=module.input_layernorm,
            mixer=self.mixer(module),
            mixed_norm=getattr(module, "post_self_attn_layernorm", None),
            post_norm=module.post_attention_layernorm,
            mlp=_mlp(module.mlp),
            shared_expert=_shared_expert(module.mlp),
            mlp_norm=getattr(module, "post_mlp_layernorm", None),
        )

    def mixer(self, module: Any) -> AttentionModules | DeltaModules:
        """Modules of a layer's attention, or of the layer's replacement for it."""
        attention = module.self_attn
        return AttentionModules(
            query=attention.q_proj,
            key=attention.k_proj,
            value=attention.v_proj,
            query_norm=attention.q_norm if self.normed_heads else None,
            key_norm=attention.k_norm if self.normed_heads else None,
            output=attention.o_proj,
        )

    def encode(
        self, network: Any, images: Sequence[PromptImage], device: torch.device, dtype: torch.dtype
    ) -> list[ImageFeatures]:
        tower = network.get_submodule(VISION)
        tensors = image_tensors(images)
        # rounded on the host, which halves the bytes to copy
        pixels = to_device(tensors[PIXELS].to(dtype), device)
        heads = tower_heads(tower, device, dtype)
        out = tower(pixels, **tower_inputs(tower, tensors[GRID], heads), **tower_options())
        sizes = [image.num_tokens for image in images]
        layers = [x.split(sizes) for x in tower_features(out, deepstack=self.deepstack)]
        return [
            ImageFeatures(embeds_VD=embeds, deepstack_VD=tuple(deepstack))
            for embeds, *deepstack in zip(*layers, strict=True)
        ]

    def activation_bytes(self, network: Any, images: Sequence[PromptImage]) -> int:
        tower = network.get_submodule(VISION)
        pixels = [image.tensors[PIXELS] for image in images]
        blocks = BlockCounts.of(tower.blocks)
        return graph_bytes(
            patches=sum(map(len, pixels)),
            # `attn.qkv` is the only name common to all three towers that gives the width
            width=tower.blocks[0].attn.qkv.in_features,
            itemsize=next(tower.parameters()).element_size(),
            trained_blocks=blocks.trained,
            recomputed_blocks=blocks.recomputed,
            mergers=1 + len(getattr(tower, "deepstack_merger_list", ())),
            pixels=max((x.shape[1] for x in pixels), default=0) if blocks.total else 0,
        )

    def segment_heads(self, network: Any, device: torch.device, dtype: torch.dtype) -> HeadShape | None:
        return tower_heads(network.get_submodule(VISION), device, dtype)


def _mlp(mlp: Any) -> MlpModules | Experts:
    """The MLP of a decoder layer; in a model with experts, some layers may have a dense MLP."""
    if not hasattr(mlp, "experts"):
        return _gated(mlp)
    return Experts(
        router_XE=mlp.gate.weight,
        gate_up_XGE=experts_tensor(mlp.experts.gate_up_proj),
        down_XEF=experts_tensor(mlp.experts.down_proj),
        per_token=experts_per_token(mlp),
        bias_X=getattr(mlp.gate, "e_score_correction_bias", None),
    )


def _shared_expert(mlp: Any) -> SharedExpertModules | None:
    if hasattr(mlp, "shared_experts"):
        return SharedExpertModules(mlp=_gated(mlp.shared_experts))
    if not hasattr(mlp, "shared_expert"):
        return None
    return SharedExpertModules(mlp=_gated(mlp.shared_expert), weight=mlp.shared_expert_gate)


def _gated(mlp: Any) -> MlpModules:
    inputs = (mlp.gate_up_proj,) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj, mlp.up_proj)
    return MlpModules(inputs=inputs, down=mlp.down_proj)


def image_tensors(images: Sequence[PromptImage]) -> dict[str, Tensor]:
    """Pixels [N, C] and grids [images, 3] of several images, the inputs of transformers' vision tower, on the host."""
    pixels = torch.from_numpy(np.concatenate([image.tensors[PIXELS] for image in images]))
    grids = torch.from_numpy(np.stack([image.tensors[GRID] for image in images]))
    return {PIXELS: pixels, GRID: grids}


@lru_cache(maxsize=256)  # most data sets have few image sizes; at 10,000 visual tokens each an entry holds 240 kB
def _offsets(rule: PositionRule, time: int, height: int, width: int) -> NDArray[np.int64]:
    offsets_3V = np.indices((time, height, width), dtype=np.int64).reshape(3, -1)
    if rule == "time":
        offsets_3V = offsets_3V[:1].repeat(3, axis=0)
    elif rule == "sequence":
        offsets_3V = np.arange(offsets_3V.shape[1])[None].repeat(3, axis=0)
    offsets_3V.setflags(write=False)
    return offsets_3V


def pixel_limits(own: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, int]:
    """Size limits under the image processor's names; `own` are the model's limits, the defaults."""
    # a limit that is set also bounds the model's other limit, so that the smallest never exceeds the largest
    smallest = min_pixels or min(own["shortest_edge"], max_pixels or own["shortest_edge"])
    largest = max_pixels or max(own["longest_edge"], min_pixels or own["longest_edge"])
    return {"shortest_edge": smallest, "longest_edge": largest}


class Qwen2VL(QwenVL):
    """ModelFamily of Qwen2-VL. Its vision tower has plain MLPs, and its config calls the tower's width `embed_dim`."""

    __slots__ = ()
    model_type: ClassVar[str] = "qwen2_vl"
    video_processor: ClassVar[str] = "Qwen2VLVideoProcessor"
    fast_path: ClassVar[FastPath] = QwenFastPath(normed_heads=False, deepstack=False)

    def vision_work(self, vision: Any) -> VisionWork:
        width = vision.embed_dim
        mlp = 2 * width * int(width * vision.mlp_ratio)
        return vision_work(vision, width=width, mlp_weights=mlp, out_width=vision.hidden_size)


class Qwen25VL(QwenVL):
    """ModelFamily of Qwen2.5-VL. Its vision tower has gated MLPs and windowed attention in most blocks."""

    __slots__ = ()
    model_type: ClassVar[str] = "qwen2_5_vl"
    video_processor: ClassVar[str] = "Qwen2VLVideoProcessor"
    fast_path: ClassVar[FastPath] = QwenFastPath(normed_heads=False, deepstack=False)

    def box_frame(self, image: PromptImage) -> tuple[int, int]:
        """Pixels of the image as the vision tower sees it (section 2.2)."""
        _, rows, columns = image.grid
        side = self.config.vision_config.patch_size
        return columns * side, rows * side

    def vision_work(self, vision: Any) -> VisionWork:
        whole = {index for index in vision.fullatt_block_indexes if index < vision.depth}
        return vision_work(
            vision,
            width=vision.hidden_size,
            mlp_weights=3 * vision.hidden_size * vision.intermediate_size,
            out_width=vision.out_hidden_size,
            windowed_layers=vision.depth - len(whole),
            # rounded down to a multiple of spatial_merge_size, as transformers does
            window_side=vision.window_size
            // vision.spatial_merge_size
            // vision.patch_size
            * vision.spatial_merge_size,
        )


class Qwen3VL(QwenVL):
    """ModelFamily of Qwen3-VL. Its decoder normalises queries and keys per head and has deepstack vision features."""

    __slots__ = ()
    model_type: ClassVar[str] = "qwen3_vl"
    video_processor: ClassVar[str] = "Qwen3VLVideoProcessor"
    fast_path: ClassVar[FastPath] = QwenFastPath(normed_heads=True, deepstack=True)
    projector_paths: ClassVar[tuple[str, ...]] = (f"{VISION}.merger", f"{VISION}.deepstack_merger_list")

    def vision_work(self, vision: Any) -> VisionWork:
        return vision_work(
            vision,
            width=vision.hidden_size,
            mlp_weights=2 * vision.hidden_size * vision.intermediate_size,
            out_width=vision.out_hidden_size,
            mergers=1 + len(getattr(vision, "deepstack_visual_indexes", ())),
        )


class Qwen3VLMoe(Qwen3VL):
    """ModelFamily of Qwen3-VL-MoE: Qwen3-VL with a mixture of experts in place of the decoder's MLPs."""

    __slots__ = ()
    model_type: ClassVar[str] = "qwen3_vl_moe"


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridFastPath(QwenFastPath):
    """FastPath of Qwen3.5, whose layers have either attention or a gated delta net."""

    def mixer(self, module: Any) -> AttentionModules | DeltaModules:
        if module.block_type != "linear_attention":
            return super(HybridFastPath, self).mixer(module)
        net = module.linear_attn
        return DeltaModules(
            inputs=(net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a),
            output=net.out_proj,
            conv_C1K=net.conv1d.weight,
            log_rate_V=net.A_log,
            decay_bias_V=net.dt_bias,
            norm_F=net.norm.weight,
        )


class Qwen35(Qwen3VL):
    """ModelFamily of Qwen3.5."""

    __slots__ = ()
    model_type: ClassVar[str] = "qwen3_5"
    fast_path: ClassVar[FastPath] = HybridFastPath(normed_heads=True, deepstack=False)
    projector_paths: ClassVar[tuple[str, ...]] = (f"{VISION}.merger",)


class Qwen35Moe(Qwen35):
    """ModelFamily of Qwen3.5-MoE: Qwen3.5 with experts, one of them shared, in place of the decoder's MLPs."""

    __slots__ = ()
    model_type: ClassVar[str] = "qwen3_5_moe"
