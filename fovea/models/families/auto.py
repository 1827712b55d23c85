"""Any image-text-to-text model of transformers, run with its own processor, positions and forward.

Everything is derived from transformers' classes, and a check at the start of a run compares the result with them
(`train.start_check`). No code here depends on a particular family.

Axes: `L` token ids.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

from fovea.errors import ModelError
from fovea.models.families.base import FastPath
from fovea.models.families.hub_processor import (
    PER_TOKEN,
    ROW,
    TEXT,
    HubProcessor,
    load_hub_processor,
    processor_class,
    prompt_image,
)
from fovea.models.flops import Work
from fovea.types import PromptImage
from fovea_gym.errors import ConfigError
from fovea_gym.rows.images import Size

PIXELS, GRID = "pixel_values", "image_grid_thw"
MERGED_SIDES = ("scale_factor", "spatial_merge_size", "downsample_factor", "pooling_kernel_size")
"""Names under which configs store the number of patches along a side of a visual token."""
OF_PROJECTOR = ("merger", "projector", "downsample")
"""Parts of the names of layers inside a tower that turn its output into visual tokens."""
LOOKED_UP = ("embed", "token")
"""Parts of the names of weights that are only added, not multiplied with inputs."""
IMAGE_IDS = ("image_token_id", "image_token_index")
"""Names under which configs store the id of a visual token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Module paths and forward arguments of a model class."""

    vision: tuple[str, ...]
    projector: tuple[str, ...]
    language: str
    arguments: frozenset[str]
    """Names of the arguments of the forward."""
    tower_weights: int
    """Number of weights of the tower's matrices, each of which multiplies every patch."""
    projector_weights: int
    """Number of weights of the projector's matrices, each of which multiplies every visual token."""
    layer_weights: int
    """Number of weights of the matrices of the decoder's layers that a token runs through."""


@dataclass(frozen=True, kw_only=True)
class AutoFamily:
    """ModelFamily of a model without a named family.

    Its positions are only for bookkeeping: in every pass the model computes its own.
    """

    config: Any
    video_processor: ClassVar[None] = None
    fast_path: ClassVar[FastPath | None] = None

    @classmethod
    def of(cls, config: Any) -> AutoFamily:
        """The family for a transformers config."""
        return cls(config=config)

    @cached_property
    def layout(self) -> Layout:
        """Layout of the model class; ModelError if its parts are not found."""
        return layout_of(self.config)

    @property
    def model_type(self) -> str:
        return str(self.config.model_type)

    @property
    def vision_paths(self) -> tuple[str, ...]:
        return self.layout.vision

    @property
    def projector_paths(self) -> tuple[str, ...]:
        return self.layout.projector

    @property
    def language_path(self) -> str:
        return self.layout.language

    @property
    def image_token_id(self) -> int:
        for name in IMAGE_IDS:
            if (index := getattr(self.config, name, None)) is not None:
                return int(index)
        raise ModelError(
            f"model.family=auto: the config of a {self.model_type} has no {' or '.join(IMAGE_IDS)}, the id of its "
            "image tokens in a prompt; add a family for it (docs/extending.md)"
        )

    @property
    def work(self) -> Work:
        """Two FLOPs per matrix weight, and in attention four per channel of a query and per (query, key) pair.

        Sliding windows are counted as full attention. The tower's class tokens are not counted, nor is its attention
        if the config has unusual names for its width and depth.
        """
        text, vision, layout = self.config.get_text_config(), _vision_config(self.config), self.layout
        heads, depth = text.num_attention_heads, getattr(vision, "num_hidden_layers", getattr(vision, "depth", 0))
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        return Work(
            token=2.0 * layout.layer_weights,
            pair=4.0 * heads * head_dim * text.num_hidden_layers,
            action=2.0 * text.hidden_size * text.vocab_size,
            patch=2.0 * (layout.tower_weights + layout.projector_weights / patches_per_token(self.config)),
            image_pair=4.0 * getattr(vision, "hidden_size", 0) * depth,
            window_pair=0.0,
            window_side=0,
        )

    def load_image_processor(self, path: str, revision: str) -> HubProcessor:
        return load_hub_processor(processor_class(self.config, path), path, revision)

    def image_mark(self, image_processor: HubProcessor) -> str:
        return image_processor.image_token

    def image_text(self, image: PromptImage) -> str:
        """Text that the processor writes for an image."""
        return image.tensors[TEXT].tobytes().decode()

    def image_options(self, _image_processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        if min_pixels or max_pixels:
            raise ConfigError(
                f"model.min_pixels, model.max_pixels: preprocessor_config.json sets the image size of a "
                f"{self.model_type}; change it there, and remove these settings"
            )
        return {}

    def fewest_tokens(self, _image_processor: Any, _size: Size, _options: Mapping[str, Any]) -> int:
        return 1

    def prompt_image(self, processed: Mapping[str, Any]) -> PromptImage:
        num_tokens = int((processed["input_ids"] == self.image_token_id).sum())
        return prompt_image(processed, num_tokens, self._grid(processed, num_tokens))

    def _grid(self, processed: Mapping[str, Any], num_tokens: int) -> tuple[int, int, int]:
        """Numbers of tiles and of patches along each side of a tile, read from the processor's tensors."""
        if (grid := processed.get(GRID)) is not None:
            time, height, width = grid[0]
            return int(time), int(height), int(width)
        pixels = next((x for name, x in processed.items() if name.removeprefix(ROW) == PIXELS), None)
        side = getattr(_vision_config(self.config), "patch_size", None)
        if pixels is None or side is None or pixels.ndim < 4:
            return 1, num_tokens, int(patches_per_token(self.config))
        rows, columns = (side, side) if isinstance(side, int) else side
        *tiles, _, height, width = pixels.shape
        return math.prod(tiles), height // rows, width // columns

    def positions(
        self, token_ids_L: NDArray[np.int64], _images: Sequence[PromptImage], start: int
    ) -> tuple[NDArray[np.int64], int]:
        """Positions [1, L] that increase by one for every token, including visual tokens."""
        end = start + len(token_ids_L)
        return np.arange(start, end)[None], end

    def box_frame(self, _image: PromptImage) -> None:
        """None: a model's files do not say in which coordinate system it localises."""
        return None

    def forward_inputs(self, token_ids: Tensor, images: Sequence[PromptImage]) -> dict[str, Tensor]:
        is_image = (token_ids == self.image_token_id).long()
        kinds = dict.fromkeys(self.layout.arguments.intersection(PER_TOKEN), is_image)
        return kinds | {name: x.to(token_ids.device) for name, x in self.image_inputs(images).items()}

    def image_inputs(self, images: Sequence[PromptImage]) -> dict[str, Tensor]:
        """Arguments of transformers' forward that hold images, on the host."""
        names = images[0].tensors if images else ()
        wanted = {name: name.removeprefix(ROW) for name in names if name.removeprefix(ROW) in self.layout.arguments}
        return {
            argument: torch.from_numpy(_joined([image.tensors[name] for image in images], int(name != argument)))
            for name, argument in wanted.items()
        }


def _joined(tensors: Sequence[NDArray[Any]], axis: int) -> NDArray[Any]:
    """Concatenate tensors of several images along `axis`, padded with zeros to the largest along all other axes."""
    largest = np.max([x.shape for x in tensors], axis=0)
    widths = [[(0, 0 if i == axis else int(n) - x.shape[i]) for i, n in enumerate(largest)] for x in tensors]
    return np.concatenate([np.pad(x, width) for x, width in zip(tensors, widths, strict=True)], axis=axis)


def layout_of(config: Any) -> Layout:
    """Layout of the model class of a config; ModelError if its parts are not found."""
    return _layout(json.dumps(config.to_dict(), default=str, sort_keys=True))


@lru_cache(maxsize=8)
def _layout(config_json: str) -> Layout:
    """Layout of the model class of a config, from the network on the meta device."""
    config = AutoConfig.for_model(**json.loads(config_json))
    with torch.device("meta"):
        network: Any = AutoModelForImageTextToText.from_config(config)
    decoder, tower = network.get_decoder(), network.get_encoder(modality="image")
    paths = {module: path for path, module in network.named_modules()}
    base = network.base_model
    if network in (decoder, tower) or base in (decoder, tower) or not hasattr(decoder, "layers"):
        raise ModelError(
            f"model.family=auto: transformers does not name the vision tower and decoder of a "
            f"{config.model_type} (get_encoder, get_decoder); add a family for it (docs/extending.md)"
        )
    between = [x for x in base.children() if x not in (decoder, tower) and any(True for _ in x.parameters())]
    between = [x for x in between if decoder not in x.modules() and tower not in x.modules()]
    projector = between or [x for name, x in tower.named_children() if any(part in name for part in OF_PROJECTOR)]
    projector_weights = sum(map(_matrix_weights, projector))
    return Layout(
        vision=tuple(paths[x] for x in (tower, *between)),
        projector=tuple(paths[x] for x in projector),
        language=paths[decoder],
        arguments=frozenset(inspect.signature(network.forward).parameters),
        tower_weights=_matrix_weights(tower) - (0 if between else projector_weights),
        projector_weights=projector_weights,
        layer_weights=_matrix_weights(decoder.layers, getattr(decoder.config, "num_experts_per_tok", 1)),
    )


def _matrix_weights(module: nn.Module, experts_per_token: int = 1) -> int:
    """Number of weights in the matrices and convolutions of a module that one input passes through."""
    found = [
        weight
        for part in module.modules()
        for name, weight in part.named_parameters(recurse=False)
        if weight.ndim > 1 and not isinstance(part, nn.Embedding) and not any(x in name for x in LOOKED_UP)
    ]
    # the weights of all experts are one tensor [experts, outputs, inputs]
    return sum(x.numel() if x.ndim != 3 else experts_per_token * x[0].numel() for x in found)


def _vision_config(config: Any) -> Any:
    """The config of the tower, or of the model if the tower has no separate config."""
    return getattr(config, "vision_config", config)


def patches_per_token(config: Any) -> float:
    """Number of patches per visual token, from any of the names that configs have for it."""
    vision = _vision_config(config)
    if (ratio := getattr(config, "downsample_ratio", None)) is not None:
        return float(round(1 / ratio) ** 2)
    if (tokens := getattr(config, "mm_tokens_per_image", None)) is not None:
        return float((vision.image_size // vision.patch_size) ** 2 / tokens)
    sides = [getattr(part, name, None) for part in (config, vision) for name in MERGED_SIDES]
    return float(max((side for side in sides if side is not None), default=1) ** 2)
