"""SmolVL's network: Qwen2-VL with the decoder of SmolLM2, and a vision tower of 1.8 million weights.

SmolLM2 is a Llama: Qwen2-VL's decoder computes the same if the biases of its projections are zero. Without images, the
three axes of M-RoPE have equal positions and are equivalent to Llama's rotary positions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from fovea.models.processor import token_id

SIDE_PX, PATCH_PX, MERGE = 32, 8, 4
"""An image is scaled to the area of 32x32 pixels: a square image is one visual token, merged from 4x4 patches."""
GRID = (1, SIDE_PX // PATCH_PX, SIDE_PX // PATCH_PX)
"""Number of patches of a square image in time, height and width."""
MARKS = {
    "<repo_name>": "<|vision_start|>",
    "<reponame>": "<|vision_end|>",
    "<file_sep>": "<|image_pad|>",
    "<filename>": "<|video_pad|>",
}
"""Special tokens that SmolLM2 used only to pre-train on code, and the Qwen2-VL tokens that replace them."""
SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The default system prompt of SmolLM2's chat template."""
CHAT_TEMPLATE = f"""\
{{%- if messages[0].role != 'system' -%}}
{{{{ '<|im_start|>system\\n{SYSTEM_PROMPT}<|im_end|>\\n' }}}}
{{%- endif -%}}
{{%- for message in messages -%}}
{{{{ '<|im_start|>' + message.role + '\\n' }}}}
{{%- if message.content is string -%}}{{{{ message.content }}}}
{{%- else -%}}
{{%- for part in message.content -%}}
{{%- if part.type == 'image' -%}}{{{{ '<|vision_start|><|image_pad|><|vision_end|>' }}}}
{{%- else -%}}{{{{ part.text }}}}{{%- endif -%}}
{{%- endfor -%}}
{{%- endif -%}}
{{{{ '<|im_end|>\\n' }}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{ '<|im_start|>assistant\\n' }}}}{{%- endif -%}}
"""
_VISION: dict[str, Any] = {
    "hidden_size": 576,  # SmolLM2's hidden size
    "depth": 2,
    "embed_dim": 64,
    "num_heads": 4,
    "mlp_ratio": 4,
    "patch_size": PATCH_PX,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "in_chans": 3,  # the name in the hub's config files, which SGLang reads
}


def build_tokenizer(own: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """The language model's `own` tokenizer with Qwen2-VL's image tokens, and a chat template that uses them."""
    written = json.loads(own.backend_tokenizer.to_str())
    vocabulary = written["model"]["vocab"]
    written["model"]["vocab"] = {MARKS.get(token, token): index for token, index in vocabulary.items()}
    for token in written["added_tokens"]:
        token["content"] = MARKS.get(token["content"], token["content"])
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(written)),
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_image_processor() -> Qwen2VLImageProcessorPil:
    """Qwen2-VL's image processor, set to scale every image to the area that the tower was trained on."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH_PX,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": SIDE_PX**2, "longest_edge": SIDE_PX**2},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def build_network(
    language: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tower: Mapping[str, Tensor]
) -> Qwen2VLForConditionalGeneration:
    """Build the network in float32 from the weights of the language model and of a vision tower."""
    network = Qwen2VLForConditionalGeneration(network_config(language, tokenizer))
    decoder = {
        f"model.language_model.{name.removeprefix('model.')}": weight
        for name, weight in language.state_dict().items()
        if name.startswith("model.")
    }
    biases = {
        name: torch.zeros(parameter.shape)
        for name, parameter in network.named_parameters()
        if name.startswith("model.language_model.") and name.endswith("_proj.bias")
    }
    vision = {f"model.visual.{name}": weight.float() for name, weight in tower.items()}
    loaded = network.load_state_dict(decoder | biases | vision, strict=False, assign=True)
    assert set(loaded.missing_keys) <= {"lm_head.weight"}, loaded
    assert not loaded.unexpected_keys, loaded
    network.tie_weights()
    generation = network.generation_config
    assert generation is not None
    generation.eos_token_id = generation.pad_token_id = tokenizer.eos_token_id
    network.eval()
    return network


def new_tower() -> Qwen2VisionTransformerPretrainedModel:
    """Create a vision tower with merger, with random weights as transformers initialises them."""
    return Qwen2VisionTransformerPretrainedModel(Qwen2VLVisionConfig(**_VISION))


def network_config(language: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Qwen2VLConfig:
    """A Qwen2-VL config with the sizes of the language model."""
    llama: Any = language.config
    half = llama.head_dim // 2
    side = half * 24 // 64  # time, height and width have the same shares as in Qwen2-VL: 16, 24 and 24 of 64
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": llama.rope_parameters["rope_theta"]}
    ids = {mark: token_id(tokenizer, mark) for mark in MARKS.values()}
    return Qwen2VLConfig(
        text_config={
            **{name: getattr(llama, name) for name in _TEXT},
            "rope_parameters": rope | {"mrope_section": [half - 2 * side, side, side]},
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "tie_word_embeddings": True,
        },
        vision_config=_VISION,
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


_TEXT = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
"""Fields that the configs of Llama and Qwen2-VL have in common."""
