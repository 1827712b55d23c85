"""Tiny models of transformers' classes with random weights, each in a folder as on the hub, by model type.

Nothing is downloaded: the tokenizer is a byte-level one with the special tokens that the type's processor looks for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from fovea.models.model_files import no_progress_bar
from fovea.models.tiny import CHAT_TEMPLATE, byte_level_bpe
from fovea.models.transformers_versions import image_processor_class

END, START, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
SIDE_PX, PATCH_PX = 48, 8
TEXT = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
VISION = {
    "model_type": "siglip_vision_model",
    "vision_use_head": False,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE_PX,
    "patch_size": PATCH_PX,
    "initializer_range": 0.1,
}
PATCHES = (SIDE_PX // PATCH_PX) ** 2
SQUARE = {"height": SIDE_PX, "width": SIDE_PX}
FULL = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Settings of a tiny model of one type."""

    image_processor: str
    """Class name, without a suffix such as Fast."""
    image: Mapping[str, Any]
    """Settings of the image processor."""
    processor: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the processor."""
    marks: Mapping[str, str]
    """Special tokens by their names in the tokenizer; `image_token` is the visual token."""
    written: str | None = None
    """Text for an image in the chat template; default: the visual token."""
    others: tuple[str, ...] = ()
    """Further special tokens."""
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def llava(**changes: Any) -> Kind:
    """A model like LLaVA: a tower, two linear layers and a decoder."""
    shared: dict[str, Any] = {
        "image_processor": "CLIPImageProcessor",
        "image": {"size": {"shortest_edge": SIDE_PX}, "crop_size": SQUARE},
        "processor": {"patch_size": PATCH_PX, "vision_feature_select_strategy": "full", "image_token": "<image>"},
        "marks": {"image_token": "<image>"},
        "config": FULL,
    }
    return Kind(**shared | changes)


MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}
GLM_VISION = {
    "model_type": "glm4v_vision",
    "depth": 2,
    "num_heads": 2,
    "out_hidden_size": 64,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def glm(**changes: Any) -> Kind:
    """A model like GLM-4.1V: a tower for images of any size, and M-RoPE."""
    shared: dict[str, Any] = {
        "image_processor": "Glm4vImageProcessor",
        "image": {"patch_size": PATCH_PX, "size": {"shortest_edge": 32 * 32, "longest_edge": 2 * 128 * 128}},
        "marks": {"image_token": "<|image|>", "video_token": "<|video|>"},
        "others": ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
        "written": "<|begin_of_image|><|image|><|end_of_image|>",
        # transformers always has these biases, vLLM only if the config says so
        "text": {"model_type": "glm4v_text", "rope_parameters": MROPE, "attention_bias": True},
        "vision": GLM_VISION,
        "config": {
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
            "video_start_token_id": "<|begin_of_video|>",
            "video_end_token_id": "<|end_of_video|>",
            "video_token_id": "<|video|>",
        },
    }
    return Kind(**shared | changes)


def idefics(**changes: Any) -> Kind:
    """A model like Idefics 3: a tower for tiles, whose positions are in the prompt, and a pixel shuffle."""
    shared: dict[str, Any] = {
        "image_processor": "Idefics3ImageProcessor",
        "image": {"size": {"longest_edge": 2 * SIDE_PX}, "max_image_size": {"longest_edge": SIDE_PX}},
        "processor": {"image_seq_len": PATCHES // 4},
        "marks": {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        "others": tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
        "vision": {"model_type": "idefics3_vision"},
        "config": {"scale_factor": 2},
    }
    return Kind(**shared | changes)


def pixtral(**changes: Any) -> Kind:
    """A model like Pixtral: a tower for images of any size, whose rows are marked in the prompt."""
    shared: dict[str, Any] = {
        "image_processor": "PixtralImageProcessor",
        "image": {"size": {"longest_edge": 64}, "patch_size": {"height": PATCH_PX, "width": PATCH_PX}},
        "processor": {"patch_size": PATCH_PX, "spatial_merge_size": 2},
        "vision": {"model_type": "pixtral", "image_size": 64, "head_dim": 32},
        "config": {"spatial_merge_size": 2, "vision_feature_layer": -1},
    }
    return Kind(**shared | changes)


KINDS: dict[str, Kind] = {
    "llava": llava(),
    "vipllava": llava(
        processor={
            "patch_size": PATCH_PX,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        vision={"model_type": "clip_vision_model"},
        config={"vision_feature_layers": [-1, -2]},
    ),
    "llava_next": llava(
        image_processor="LlavaNextImageProcessor",
        image={
            "size": {"shortest_edge": SIDE_PX},
            "crop_size": SQUARE,
            "image_grid_pinpoints": [[48, 96], [96, 48], [96, 96]],
        },
        config=FULL | {"image_grid_pinpoints": [[48, 96], [96, 48], [96, 96]]},
    ),
    "llava_onevision": llava(
        image_processor="LlavaOnevisionImageProcessor",
        image={"size": SQUARE, "image_grid_pinpoints": [[48, 48], [48, 96], [96, 48]]},
        processor={"num_image_tokens": PATCHES, "vision_feature_select_strategy": "full"},
        marks={"image_token": "<image>", "video_token": "<video>"},
        config=FULL | {"image_grid_pinpoints": [[48, 48], [48, 96], [96, 48]]},
        text={"model_type": "qwen2"},
    ),
    "internvl": Kind(
        image_processor="GotOcr2ImageProcessor",
        image={"size": SQUARE, "min_patches": 1, "max_patches": 3},
        processor={"image_seq_length": PATCHES // 4},
        marks={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        written="<IMG_CONTEXT>",
        text={"model_type": "qwen2"},
        vision={"model_type": "internvl_vision", "image_size": [SIDE_PX, SIDE_PX], "patch_size": [PATCH_PX, PATCH_PX]},
        config={"downsample_ratio": 0.5, "image_seq_length": PATCHES // 4},
    ),
    "gemma3": Kind(
        image_processor="Gemma3ImageProcessor",
        image={"size": SQUARE},
        processor={"image_seq_length": 9},
        marks={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        written="<start_of_image>",
        text={"model_type": "gemma3_text", "sliding_window": 64},
        config={"mm_tokens_per_image": 9},
    ),
    "gemma4": Kind(
        image_processor="Gemma4ImageProcessor",
        image={"patch_size": 4, "max_soft_tokens": 70},
        marks={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        others=("<|video|>",),
        text={
            "model_type": "gemma4_text",
            "sliding_window": 64,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": 700,
            "hidden_size_per_layer_input": 16,
            "use_bidirectional_attention": "vision",
            "global_head_dim": 32,
        },
        vision={
            "model_type": "gemma4_vision",
            "patch_size": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "position_embedding_size": 700,
        },
        config={"audio_config": None},
    ),
    "idefics3": idefics(),
    "smolvlm": idefics(image_processor="SmolVLMImageProcessor", vision={"model_type": "smolvlm_vision"}),
    "glm4v": glm(),
    "glm46v": glm(image_processor="Glm46VImageProcessor"),
    "glm4v_moe": glm(
        text={
            "model_type": "glm4v_moe_text",
            "rope_parameters": MROPE,
            "num_hidden_layers": 3,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 3,
            "topk_group": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
        vision=GLM_VISION | {"model_type": "glm4v_moe_vision"},
    ),
    "deepseek_vl": llava(
        image_processor="DeepseekVLImageProcessor",
        image={"size": SQUARE, "min_size": 14},
        processor={"num_image_tokens": PATCHES},
        config={},
    ),
    "aya_vision": Kind(
        image_processor="GotOcr2ImageProcessor",
        image={"size": SQUARE, "min_patches": 1, "max_patches": 3, "crop_to_patches": True},
        processor={"patch_size": PATCH_PX, "img_size": SIDE_PX, "downsample_factor": 2},
        marks={"image_token": "<image>"},
        others=("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "<|IMG_PATCH|>", "TILE", "TILE_GLOBAL"),
        text={"model_type": "cohere2"},
        config={"downsample_factor": 2, "image_token_id": "<|IMG_PATCH|>", "image_token_index": "<|IMG_PATCH|>"},
    ),
    "mistral3": pixtral(
        marks={"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        text={"model_type": "mistral", "sliding_window": None},
    ),
    "lighton_ocr": pixtral(
        marks={
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
        text={"model_type": "qwen3"},
    ),
}
"""Settings of tiny models by model type, in addition to the Qwen-VLs of `model.tiny`."""


def save_tiny_kind(model_type: str, folder: Path, corpus: Iterable[str] = (), seed: int = 0) -> Path:
    """Write the folder of a tiny model of this type, and return it."""
    kind = KINDS[model_type]
    tokenizer = _tokenizer(kind, corpus)
    folder.mkdir(parents=True, exist_ok=True)
    with no_progress_bar():
        _network(model_type, kind, tokenizer, seed).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        image_processor_class(kind.image_processor)(**kind.image).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(dict(kind.processor)))
    return folder


def _tokenizer(kind: Kind, corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    bpe = byte_level_bpe(corpus, 400)
    special = list(dict.fromkeys([PAD, START, END, *kind.marks.values(), *kind.others]))
    bpe.add_special_tokens(special)
    roles: dict[str, Any] = {"extra_special_tokens": dict(kind.marks)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False, **roles
    )
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [START, *kind.others]}, replace_extra_special_tokens=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "<|vision_start|><|image_pad|><|vision_end|>", kind.written or kind.marks["image_token"]
    )
    return tokenizer


def _network(model_type: str, kind: Kind, tokenizer: PreTrainedTokenizerFast, seed: int) -> Any:
    ids = tokenizer.convert_tokens_to_ids
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    image = kind.marks.get("image_token") or kind.marks["context_image_token"]
    token_ids = {key: ids(x) for key, x in kind.config.items() if isinstance(x, str) and x in tokenizer.get_vocab()}
    config = AutoConfig.for_model(
        model_type,
        text_config=TEXT | {"vocab_size": len(tokenizer), "tie_word_embeddings": True} | special | dict(kind.text),
        vision_config=VISION | dict(kind.vision),
        tie_word_embeddings=True,
        **{"image_token_id": ids(image), "image_token_index": ids(image)} | dict(kind.config) | token_ids | special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: Any = AutoModelForImageTextToText.from_config(config).float()
        for weight in network.parameters():
            if weight.ndim > 1 and not weight.any():
                # Gemma 3's projector is initialised to zero, which would hide the picture
                torch.nn.init.normal_(weight, std=0.1)
        for name, buffer in network.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    network.generation_config.eos_token_id = tokenizer.eos_token_id
    return network.eval()
