"""Any image-text-to-text model of transformers, by its own processor, its own positions and its own forward.

Everything is derived from transformers' classes, and a check at the start of a run compares the result with them
(`train.start_check`). Nothing here knows of a family.

Axes: `L` token ids.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

from fovea.data.images import Size
from fovea.errors import ConfigError, ModelError
from fovea.models.families.base import FastPath
from fovea.models.families.hub_processor import (
    PER_TOKEN,
    ROW,
    HubProcessor,
    HubPrompts,
    load_hub_processor,
    prompt_image,
)
from fovea.models.flops import Work
from fovea.types import PromptImage

IMAGE_IDS = ("image_token_id", "image_token_index")
"""Names by which configs have the id of a visual token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Module paths and forward arguments of a model class."""

    vision: tuple[str, ...]
    projector: tuple[str, ...]
    language: str
    arguments: frozenset[str]
    """Names of the arguments of the forward."""
    vision_weights: int
    """Number of weights of the tower and the projector."""
    layer_weights: int
    """Number of weights of the decoder's layers."""


@dataclass(frozen=True, kw_only=True)
class AutoFamily(HubPrompts):
    """ModelFamily of a model that no other family names.

    Its positions are bookkeeping: every pass leaves positions to the model.
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
        """Layout of the model class; ModelError where its parts are not found."""
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
            f"model.family=auto: the config of a {self.model_type} has no {' or '.join(IMAGE_IDS)}, the id that its "
            "images have in a prompt; add a family for it (docs/extending.md)"
        )

    @property
    def work(self) -> Work:
        """An estimate for any kind of layer: two FLOPs per weight and token, all experts of a mixture counted."""
        text = self.config.get_text_config()
        return Work(
            token=2.0 * self.layout.layer_weights,
            pair=4.0 * text.hidden_size * text.num_hidden_layers,
            action=2.0 * text.hidden_size * text.vocab_size,
            patch=2.0 * self.layout.vision_weights,
            image_pair=0.0,
            window_pair=0.0,
            window_side=0,
        )

    def load_image_processor(self, path: str, revision: str) -> HubProcessor:
        return load_hub_processor(self.config, path, revision)

    def image_options(self, _image_processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        if min_pixels or max_pixels:
            raise ConfigError(
                f"model.min_pixels, model.max_pixels: with model.family=auto the size of images is that of the "
                f"{self.model_type}'s preprocessor_config.json; change it there, and leave them out"
            )
        return {}

    def fewest_tokens(self, _image_processor: Any, _size: Size, _options: Mapping[str, Any]) -> int:
        return 1

    def prompt_image(self, processed: Mapping[str, Any]) -> PromptImage:
        return prompt_image(processed, self.image_token_id)

    def box_frame(self, _image: PromptImage) -> None:
        """Nothing: in which frame a model gives coordinates is in no file of it."""
        return None

    def forward_inputs(self, token_ids: Tensor, images: Sequence[PromptImage]) -> dict[str, Tensor]:
        is_image = (token_ids == self.image_token_id).long()
        kinds = dict.fromkeys(self.layout.arguments.intersection(PER_TOKEN), is_image)
        names = images[0].tensors if images else ()
        wanted = {name: name.removeprefix(ROW) for name in names if name.removeprefix(ROW) in self.layout.arguments}
        return kinds | {
            argument: torch.from_numpy(_joined([image.tensors[name] for image in images], int(name != argument))).to(
                token_ids.device
            )
            for name, argument in wanted.items()
        }


def _joined(tensors: Sequence[NDArray[Any]], axis: int) -> NDArray[Any]:
    """Tensors of several images one after the other, with zeros up to the largest along all other axes."""
    largest = np.max([x.shape for x in tensors], axis=0)
    widths = [[(0, 0 if i == axis else int(n) - x.shape[i]) for i, n in enumerate(largest)] for x in tensors]
    return np.concatenate([np.pad(x, width) for x, width in zip(tensors, widths, strict=True)], axis=axis)


def layout_of(config: Any) -> Layout:
    """Layout of the model class of a config; ModelError where its parts are not found."""
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
            f"model.family=auto: transformers names no vision tower and decoder of a {config.model_type} "
            "(get_encoder, get_decoder); add a family for it (docs/extending.md)"
        )
    between = [x for x in base.children() if x not in (decoder, tower) and any(True for _ in x.parameters())]
    between = [x for x in between if decoder not in x.modules() and tower not in x.modules()]
    return Layout(
        vision=tuple(paths[x] for x in (tower, *between)),
        projector=tuple(paths[x] for x in between) or _mergers(paths[tower], tower),
        language=paths[decoder],
        arguments=frozenset(inspect.signature(network.forward).parameters),
        vision_weights=sum(x.numel() for module in (tower, *between) for x in module.parameters()),
        layer_weights=sum(x.numel() for x in decoder.layers.parameters()),
    )


def _mergers(path: str, tower: nn.Module) -> tuple[str, ...]:
    """Paths of the layers inside a tower that make visual tokens of its output."""
    return tuple(f"{path}.{name}" for name, _ in tower.named_children() if "merger" in name or "projector" in name)
