"""Tiny Qwen-VL models of all families, and prompts with no, one and two images."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.processing_utils import ProcessorMixin

from fovea.config.model import TinyModel
from fovea.models.heads import ValueHead
from fovea.models.policy_network import PolicyNetwork
from fovea.models.render import Renderer
from fovea.models.tiny import FixedSizes, TinyParts, make_tiny
from fovea.models.vlm import VLM
from fovea.train.packing import pack_row
from fovea.types import Prompt
from fovea_gym.types import ImageRef, Message, PixelChange
from gym_tests.images import from_array

DENSE_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
FAMILIES = (*DENSE_FAMILIES, "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
CORPUS = ["How many circles are there?", "What colour is the square?", "\\boxed{3}", "\\boxed{red}"] * 20
CPU = torch.device("cpu")


def image(seed: int, height: int = 48, width: int = 48, change: PixelChange | None = None) -> ImageRef:
    """Noise of a separate size."""
    values = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return ImageRef(source=values, change=change)


def user(*parts: str | ImageRef) -> list[Message]:
    return [Message(role="user", parts=parts)]


def tiny(family: str, seed: int = 0, **settings: object) -> TinyParts:
    fixed = {name: settings.pop(name) for name in FixedSizes.__dataclass_fields__ if name in settings}
    made = FixedSizes(**fixed)  # type: ignore[arg-type]
    return make_tiny(TinyModel(family=family, **settings), CORPUS, seed, made)  # type: ignore[arg-type]


def with_dense_layer(parts: TinyParts) -> TinyParts:
    """A model with experts like this one, but with an MLP for all tokens in its second layer; new weights."""
    config = copy.deepcopy(parts.network.config)
    config.text_config.mlp_only_layers = [1]
    return _of_config(parts, config)


def with_deepstack(parts: TinyParts, layers: Sequence[int]) -> TinyParts:
    """A Qwen3-VL like this one whose decoder gets the features of these vision layers; new weights."""
    config = copy.deepcopy(parts.network.config)
    config.vision_config.deepstack_visual_indexes = list(layers)
    return _of_config(parts, config)


def _of_config(parts: TinyParts, config: Any) -> TinyParts:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TinyParts(network=type(parts.network)(config).eval(), processor=parts.processor)


def save(parts: TinyParts, folder: Path) -> Path:
    """The files of a hub repository."""
    parts.network.save_pretrained(folder)
    parts.processor.tokenizer.save_pretrained(folder)
    parts.processor.image_processor.save_pretrained(folder)
    return folder


def renderer(parts: TinyParts) -> Renderer:
    return Renderer(parts.processor, from_array)


PROCESSORS = {
    "qwen2_vl": transformers.Qwen2VLProcessor,
    "qwen2_5_vl": transformers.Qwen2_5_VLProcessor,
    "qwen3_vl": transformers.Qwen3VLProcessor,
}


def processor_of(parts: TinyParts, family: str) -> ProcessorMixin:
    """transformers' processor without its video processor, which needs torchvision."""

    def init(self: ProcessorMixin, image_processor: object, tokenizer: object, chat_template: str) -> None:
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
        for kind in ("image", "video"):
            token = f"<|{kind}_pad|>"
            setattr(self, f"{kind}_token", token)
            setattr(self, f"{kind}_token_id", parts.processor.tokenizer.convert_tokens_to_ids(token))

    without_videos = type(PROCESSORS[family].__name__, (PROCESSORS[family],), {"__init__": init})
    return without_videos(parts.processor.image_processor, parts.processor.tokenizer, parts.processor.chat_template)


def mixed_prompts(parts: TinyParts, change: PixelChange | None = None) -> list[Prompt]:
    """One image, two images of different size among text, none."""
    render = renderer(parts)
    first, second, third = image(1, change=change), image(2, change=change), image(3, 64, 96, change)
    return [
        render.prompt(user(first, "How many circles?")),
        render.prompt(user("Compare ", second, " with ", third, ": how many circles are there?")),
        render.prompt(user("What colour is the square?")),
    ]


def random_completions(counts: Sequence[Sequence[int]], seed: int = 0) -> list[list[np.ndarray]]:
    """Completions of these lengths, of ordinary tokens."""
    rng = np.random.default_rng(seed)
    return [[rng.integers(0, 250, length) for length in lengths] for lengths in counts]


def packed_logprobs(parts: TinyParts) -> torch.Tensor:
    """Log-probs of some completions of `mixed_prompts` in one packed row."""
    row = pack_row(parts.processor.family, mixed_prompts(parts), random_completions([(4, 6), (3,), (5,)]), CPU)
    with torch.no_grad():
        return VLM(parts.network, parts.processor.banned_ids)(row, temperature=1.0, chunk_tokens=100).logprobs_A


def tower_passes(vlm: PolicyNetwork) -> list[int]:
    """Patches of each forward pass of the vision tower from now on."""
    passes: list[int] = []
    tower = vlm.network.get_submodule("model.visual")
    tower.register_forward_pre_hook(lambda _tower, args: passes.append(len(args[0])))
    return passes


def with_values(path: Callable[..., PolicyNetwork], parts: TinyParts) -> PolicyNetwork:
    """The model with a value head that is not zero."""
    head = ValueHead(64, detach_trunk=False)
    with torch.no_grad():
        head.linear.weight.copy_(torch.linspace(-0.1, 0.1, 64)[None])
    return path(parts.network, parts.processor.banned_ids, value_head=head)
