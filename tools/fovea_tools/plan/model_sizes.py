"""Sizes of a model, computed from its config without reading or allocating any weights.

The network is built on torch's meta device, with the frozen weights and adapters that it has in a run, and its
parameters are counted.
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
"""Towers of named families that accept images of any size, rather than batches of tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that FSDP2 gathers and reduces together: a layer, a block, or the rest."""

    part: str
    """`language`, `vision` or `root` (embedding, head, last norm, and weights of the tower outside its blocks)."""
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
    """True if the outputs of attention and MLP are normalised."""
    units: tuple[Unit, ...]
    head_trains: bool
    """True if the language-model head has a gradient."""
    tied: bool
    """True if the head shares the embedding's weight."""
    trains_vision: bool
    language_weights: int
    """Number of weights in the decoder layers and the head, all of which a decode step reads."""

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
        """Side of a patch in pixels."""
        side = self.vision.patch_size
        return int(side if isinstance(side, int) else side[0])

    @property
    def merged_side(self) -> int:
        """Side of a visual token in patches."""
        return math.isqrt(int(patches_per_token(self.family.config)))

    def grid(self, visual_tokens: int) -> tuple[int, int, int]:
        """Tiles, and height and width in patches, of a squarish image with at least this many visual tokens."""
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
    """Sizes of the model that these settings name; ModelError if its config.json cannot be found."""
    loaded = _config_of(config.model)
    family = family_of(loaded, config.model.name)
    if not isinstance(family, QwenVL | NamedFamily):
        raise ConfigError(
            f"{config.model.name} is a {family.model_type} model, and `fovea plan` cannot estimate the memory of its "
            "vision tower; set model.path to a model with a fast path (docs/models.md)"
        )
    if config.model.fast_path == "off" or family.fast_path is None:
        raise ConfigError(
            f"{config.model.name} with model.fast_path={config.model.fast_path} runs transformers' own forward, whose "
            "memory `fovea plan` cannot estimate; set model.fast_path=auto, or set model.path to a model with a fast "
            "path (docs/models.md)"
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
            f"model.path={path}: the folder has no config.json; add this file, the only one that `fovea plan` reads"
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
            f"model.path={path}: its config.json is neither in the local cache nor available from the hub "
            f"({first_line}); set model.path to a folder with this file, the only one that `fovea plan` reads"
        ) from error


def _on_meta(loaded: Any, settings: Model) -> Any:
    with torch.device("meta"):
        network = AutoModelForImageTextToText.from_config(loaded)
    choose_trainable(network, settings, seed=0)
    return network


def _units(network: Any) -> Iterable[Unit]:
    """FSDP2's units as `train.torch.sharding.shard` wraps them: decoder layers, vision blocks, and the root."""
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
