"""What a loaded Qwen-VL consists of, and the few places where its families differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

IMAGE_PAD = "<|image_pad|>"
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """A network with the tokenizer, image processor and chat template that belong to it."""

    network: PreTrainedModel
    """`Qwen*VLForConditionalGeneration` of transformers."""
    tokenizer: PreTrainedTokenizerBase
    image_processor: Any
    """`Qwen2VLImageProcessorPil`: PIL and numpy only, so that torchvision is not needed."""
    chat_template: str
    name: str
    """Folder, hub id or tiny family, for messages."""


def vision_tower(network: nn.Module) -> nn.Module:
    """The vision tower of any family."""
    tower = network.get_submodule("model.visual")
    assert isinstance(tower, nn.Module)
    return tower


def language_model(network: nn.Module) -> Any:
    """The decoder stack of any family, without the head."""
    return network.get_submodule("model.language_model")


def config_of(module: nn.Module) -> Any:
    """The config that transformers keeps in a module; its fields differ by family."""
    return module.config


def token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    """Id of one token."""
    index = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(index, int), f"{token} has no id"
    return index


def stop_token_ids(parts: ModelParts) -> tuple[int, ...]:
    """Ids that end a completion: the generation config's, and the tokenizer's own end token."""
    configured = getattr(parts.network.generation_config, "eos_token_id", None)
    ids = [configured] if isinstance(configured, int) else list(configured or [])
    own = parts.tokenizer.eos_token_id
    return tuple(dict.fromkeys([*ids, *([own] if isinstance(own, int) else [])]))


def banned_token_ids(parts: ModelParts) -> tuple[int, ...]:
    """Special tokens that no completion may hold: an image pad in a completion breaks the next forward pass.

    Entries of the embedding beyond the tokenizer's vocabulary (padding of the matrix) are banned too.
    """
    added = parts.tokenizer.added_tokens_decoder
    special = {index for index, token in added.items() if token.special}
    embedding = language_model(parts.network).get_submodule("embed_tokens")
    assert isinstance(embedding, nn.Embedding)
    beyond = range(len(parts.tokenizer), embedding.num_embeddings)
    return tuple(sorted((special | set(beyond)) - set(stop_token_ids(parts))))
