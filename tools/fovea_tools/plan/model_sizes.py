"""Sizes of a model, only from its config: no weights are read, and no memory is taken for any.

The network is made on torch's meta device, frozen and given adapters as a run does it, and its parameters are counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from fovea.config.model import Model
from fovea.config.run import Config
from fovea.errors import ModelError
from fovea.models.decoder import DecoderShape, decoder_shape
from fovea.models.families.auto import patches_per_token
from fovea.models.families.named import NamedFamily
from fovea.models.families.qwen_vl import QwenVL
from fovea.models.families.registry import family_of
from fovea.models.model_files import check_place, damaged_model, hub_options
from fovea.models.modules import language_model, vision_modules
from fovea.models.tiny import tiny_config
from fovea.models.trainable import choose_trainable
from fovea.utils.config_keys import check_config_keys
from fovea_gym.errors import ConfigError

ANY_SIZE = ("pixtral", "glm4v_vision", "glm4v_moe_vision")
"""Towers of named families that take images of any size, not batches of tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that are gathered, and whose gradients are reduced, together: a layer, a block, or the rest."""

    part: str
    """`language`, `vision` or `root` (embedding, head, last norm, and what of the tower is in no block)."""
    total: int
    trainable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Shapes and parameter counts of a model."""

    family: QwenVL | NamedFamily
    text: Any
    """transformers' config of the language model."""
    vision: Any
    """transformers' config of the vision tower."""
    decoder: DecoderShape
    norms_outputs: bool
    """True if the outputs of attention and MLP have norms."""
    units: tuple[Unit, ...]
    head_trains: bool
    """True if the language-model head has a gradient."""
    tied: bool
    """True if the head is the embedding."""
    trains_vision: bool
    language_weights: int
    """Numbers in the matrices of the decoder layers and the head, which a decode step reads."""

    @property
    def parameters(self) -> int:
        return sum(unit.total for unit in self.units)

    @property
    def trainable(self) -> int:
        return sum(unit.trainable for unit in self.units)

    @property
    def vocabulary(self) -> int:
        return int(self.text.vocab_size)

    @property
    def patch_px(self) -> int:
        """Pixels along a side of a patch."""
        side = self.vision.patch_size
        return int(side if isinstance(side, int) else side[0])

    @property
    def merged_side(self) -> int:
        """Patches along a side of a visual token."""
        return math.isqrt(int(patches_per_token(self.family.config)))

    def grid(self, visual_tokens: int) -> tuple[int, int, int]:
        """Patches in tiles, height and width of images as square as it gets, with at least so many visual tokens."""
        if isinstance(self.family, NamedFamily) and self.vision.model_type not in ANY_SIZE:
            size = self.vision.image_size
            side = int(size if isinstance(size, int) else size[0]) // self.patch_px
            return -(-visual_tokens // (side // self.merged_side) ** 2), side, side
        height = max(1, math.isqrt(visual_tokens))
        return 1, self.merged_side * height, self.merged_side * -(-visual_tokens // height)

    @property
    def width(self) -> int:
        """Width of the language model."""
        return int(self.text.hidden_size)

    def of(self, part: str) -> list[Unit]:
        """The units of one part."""
        return [unit for unit in self.units if unit.part == part]


def model_sizes(config: Config) -> ModelSizes:
    """Sizes of the model of these settings; ModelError where its config.json cannot be found."""
    loaded = _config_of(config.model)
    family = family_of(loaded, config.model.name)
    if not isinstance(family, QwenVL | NamedFamily):
        raise ConfigError(
            f"{config.model.name} is a {family.model_type}, whose tower's memory `fovea plan` does not know; name "
            "a model with a fast path in model.path (docs/models.md)"
        )
    if config.model.fast_path == "off" or family.fast_path is None:
        raise ConfigError(
            f"{config.model.name} with model.fast_path={config.model.fast_path} runs transformers' own forward, whose "
            "memory `fovea plan` does not know; set model.fast_path=auto, or name a model with a fast path in "
            "model.path (docs/models.md)"
        )
    network = _on_meta(loaded, config.model)
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    layers = language_model(network).layers
    return ModelSizes(
        family=family,
        text=loaded.text_config,
        vision=loaded.vision_config,
        decoder=decoder_shape(loaded.text_config),
        norms_outputs=family.fast_path.layer(layers[0]).mlp_norm is not None,
        units=tuple(_units(network)),
        head_trains=head.weight.requires_grad,
        tied=head.weight is embedding.weight,
        trains_vision=any(p.requires_grad for module in vision_modules(network) for p in module.parameters()),
        language_weights=_count(layers.parameters()) + head.weight.numel(),
    )


def _config_of(settings: Model) -> Any:
    if settings.tiny is not None:
        return tiny_config(settings.tiny)
    path = str(settings.path)
    folder = Path(path).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(
            f"model.path={path}: the folder has no config.json, the only file of a model that a plan reads"
        )
    if folder.is_dir():
        with damaged_model(path):
            check_config_keys(str(folder), "main")
            return AutoConfig.from_pretrained(str(folder), **hub_options(settings))
    check_place(path, settings.revision)
    try:
        check_config_keys(path, settings.revision or "main")
        return AutoConfig.from_pretrained(path, **hub_options(settings))
    except (OSError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ModelError(
            f"model.path={path}: its config.json is not in the local cache, and the hub does not give it ({first_line})"
            "; give a folder that holds this file, the only one of a model that a plan reads"
        ) from error


def _on_meta(loaded: Any, settings: Model) -> Any:
    with torch.device("meta"):
        network = AutoModelForImageTextToText.from_config(loaded)
    choose_trainable(network, settings, seed=0)
    return network


def _units(network: Any) -> Iterable[Unit]:
    """The units of FSDP2 as `train.torch.sharding.shard` makes them: decoder layers, vision blocks, the root."""
    layers = list(language_model(network).layers)
    lists = [each for module in vision_modules(network) for each in module.modules() if isinstance(each, nn.ModuleList)]
    blocks = [block for each in lists for block in each]
    for part, modules in (("language", layers), ("vision", blocks)):
        yield from (_unit(part, module.parameters()) for module in modules)
    inside = {id(parameter) for module in (*layers, *blocks) for parameter in module.parameters()}
    yield _unit("root", (parameter for parameter in network.parameters() if id(parameter) not in inside))


def _unit(part: str, parameters: Iterable[nn.Parameter]) -> Unit:
    found = list(parameters)
    return Unit(part=part, total=_count(found), trainable=_count(p for p in found if p.requires_grad))


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
