"""A model of Qwen3-VL-2B's shape with random weights, created on the device, and a tokenizer for its vocabulary.

Nothing is downloaded. The speed does not depend on the weights, since completions have a fixed length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from fovea.models.families.qwen_vl import IMAGE_PAD
from fovea.models.processor import token_id
from fovea.models.tiny import SPECIAL_TOKENS, TinyParts, build_image_processor, with_chat_tokens, with_processor

ROPE: dict[str, Any] = {"rope_type": "default", "mrope_interleaved": True}
QWEN3_VL_2B: dict[str, dict[str, Any]] = {
    "text": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rope_parameters": ROPE | {"rope_theta": 5_000_000.0, "mrope_section": [24, 20, 20]},
    },
    "vision": {
        "depth": 24,
        "hidden_size": 1024,
        "num_heads": 16,
        "intermediate_size": 4096,
        "out_hidden_size": 2048,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}
SMALL: dict[str, dict[str, Any]] = {
    "text": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "rope_parameters": ROPE | {"rope_theta": 10_000.0, "mrope_section": [6, 5, 5]},
    },
    "vision": {
        "depth": 4,
        "hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 128,
        "out_hidden_size": 64,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1, 2],
    },
}
"""A small shape, to test the benchmark without a GPU."""
PATCH_PX, MERGE = 16, 2


def make_shaped(shape: dict[str, dict[str, Any]], device: str, dtype: torch.dtype, seed: int = 0) -> TinyParts:
    """Make the network and processor of this shape; equal arguments give equal results."""
    tokenizer = build_wide_tokenizer(shape["text"]["vocab_size"])
    network = _build_network(shape, tokenizer, device, dtype, seed)
    image_processor = build_image_processor(PATCH_PX)
    return with_processor(network, tokenizer, image_processor, "random weights")


def build_wide_tokenizer(vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Build a byte tokenizer that can decode any id, so that only special tokens are banned, as in a real model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"w{index}" for index in range(len(alphabet), vocabulary_size - len(SPECIAL_TOKENS))]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *words])}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    return with_chat_tokens(bpe)


def _build_network(
    shape: dict[str, dict[str, Any]], tokenizer: PreTrainedTokenizerFast, device: str, dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    config = Qwen3VLConfig(
        text_config={**shape["text"], "tie_word_embeddings": True, "pad_token_id": tokenizer.pad_token_id},
        vision_config={
            **shape["vision"],
            "patch_size": PATCH_PX,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
        },
        tie_word_embeddings=True,
        image_token_id=token_id(tokenizer, IMAGE_PAD),
        video_token_id=token_id(tokenizer, "<|video_pad|>"),
        vision_start_token_id=token_id(tokenizer, "<|vision_start|>"),
        vision_end_token_id=token_id(tokenizer, "<|vision_end|>"),
    )
    with torch.random.fork_rng(), torch.device(device), _default_dtype(dtype):
        torch.manual_seed(seed)
        network: PreTrainedModel = Qwen3VLForConditionalGeneration(config)
    assert network.generation_config is not None
    network.generation_config.pad_token_id = tokenizer.pad_token_id
    network.eval()
    return network


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context in which new parameters get this dtype; rotary frequencies stay float32, as in a loaded checkpoint."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
