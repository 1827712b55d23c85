"""Tiny Qwen-VL models of transformers' classes, with random weights and a small tokenizer like Qwen's.

Nothing is downloaded: the tokenizer is trained on the texts of the task.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fovea.config.model import TinyModel
from fovea.errors import ModelError
from fovea.models.families.qwen_vl import IMAGE_PAD, ImageProcessor
from fovea.models.load import save_in_hub_layout
from fovea.models.model_files import no_progress_bar, save_tokenizer
from fovea.models.processor import Processor, make_processor, token_id
from fovea.models.transformers_versions import SPECIAL_TOKENS_KEY, rope_fields
from fovea_gym.utils.files import atomic_folder

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    IMAGE_PAD,
    "<|video_pad|>",
)
# Qwen splits digits one by one and keeps a leading space with its word
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MAX_TEXT_CHARS = 2_000
"""Characters used of each text to train a tokenizer: the time of a merge grows with the square of a word's length."""
MAX_CORPUS_CHARS = 2_000_000
"""Characters of all texts together used to train a tokenizer."""
MERGE = 2
CLASS_NAME = {
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
}
"""Prefix of the names of transformers' classes, by family."""
HYBRID = ("qwen3_5", "qwen3_5_moe")
"""Families whose decoders have gated delta nets."""
FULL_ATTENTION_EVERY = 4
"""In these families, every fourth layer and the last layer have attention; the others are gated delta nets."""

STEP_RANGE = (0.001, 0.1)
"""Range of the initial decay steps of gated delta nets, sampled as in Mamba (Gu and Dao, arXiv 2312.00752)."""
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""The template of Qwen2-VL and Qwen2.5-VL, which does not support tools."""
_LIST = """\
{%- if tools -%}
{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' -%}
{%- for part in messages[0].content -%}{{ part.text }}{%- endfor -%}{{ '\\n\\n' }}
{%- set messages = messages[1:] -%}
{%- endif -%}
{{ '<tools>' }}
{%- for tool in tools -%}{{ '\\n' + tool | tojson }}{%- endfor -%}
{{ '\\n</tools>\\nFORM<|im_end|>\\n' }}
{%- endif -%}
"""
_BEGIN = "{{ '<|im_start|>' + message.role + '\\n' }}"
_BEGIN_WITH_RESULTS = """\
{%- if message.role != 'tool' -%}{{ '<|im_start|>' + message.role + '\\n' }}
{%- else -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' }}
{%- endif -%}"""
_END = "{{ '<|im_end|>\\n' }}"
_END_WITH_RESULTS = """\
{%- if message.role == 'tool' -%}{{ '\\n</tool_response>' }}{%- endif -%}
{%- if message.role != 'tool' or loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}"""
_FORMS = {
    "json": '<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>',
    "xml": "<tool_call>\\n<function=...>\\n<parameter=...>\\n...\\n</parameter>\\n</function>\\n</tool_call>",
}
_FORM_OF_FAMILY = {"qwen3_vl": "json", "qwen3_vl_moe": "json", "qwen3_5": "xml", "qwen3_5_moe": "xml"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSizes:
    """Sizes of a tiny model that have no setting: as small as the code paths of all families allow."""

    num_experts: int = 4
    """Number of experts in a decoder layer of qwen3_vl_moe and qwen3_5_moe."""
    experts_per_token: int = 2
    """Number of experts in a layer that a token runs through: more than one, so that their weights matter."""
    shared_expert_size: int = 48
    """Width of the shared expert of qwen3_5_moe."""
    vision_hidden_size: int = 64
    """Width of the vision tower: a multiple of 4 * vision_heads, as rotary positions of height and width require."""
    vision_depth: int = 2
    """Number of blocks in the vision tower; in qwen2_5_vl, one has windows and one does not."""
    vision_heads: int = 2
    """Number of attention heads in the vision tower."""
    patch_size_px: int = 8
    """Side of a patch in pixels; one visual token covers 2x2 patches, and a scene of 48 px takes 9 visual tokens."""
    init_std: float = 0.1
    """Standard deviation of the random weights, above the 0.02 of full-size models because the layers are narrow."""


FIXED = FixedSizes()


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyParts:
    """A tiny network and its processor."""

    network: PreTrainedModel
    processor: Processor


def make_tiny(settings: TinyModel, corpus: Iterable[str], seed: int, fixed: FixedSizes = FIXED) -> TinyParts:
    """A tiny Qwen-VL with random weights, which are equal for equal arguments."""
    tokenizer = build_tokenizer(corpus, settings.vocabulary_size)
    tokenizer.chat_template = chat_template(settings.family)
    network = _build_network(settings, fixed, tokenizer, seed)
    return with_processor(network, tokenizer, build_image_processor(fixed.patch_size_px), f"tiny {settings.family}")


def with_processor(
    network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, image_processor: Any, name: str
) -> TinyParts:
    """The network with a processor whose special ids are derived from the network's current configs."""
    assert network.generation_config is not None
    template = tokenizer.chat_template
    assert isinstance(template, str), f"{name} has no chat template"
    processor = make_processor(network.config, network.generation_config, tokenizer, image_processor, template, name)
    return TinyParts(network=network, processor=processor)


def save_tiny(parts: TinyParts, folder: Path) -> None:
    """Write a complete Hugging Face model folder; replaces an existing `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    with atomic_folder(folder) as partial, no_progress_bar():
        save_in_hub_layout(parts.network, partial)
        parts.processor.image_processor.save_pretrained(partial)
        save_tokenizer(parts.processor.tokenizer, partial)


def build_tokenizer(corpus: Iterable[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE tokenizer with Qwen's special tokens, trained on the beginnings of the texts of `corpus`."""
    return with_chat_tokens(byte_level_bpe(corpus, vocabulary_size - len(SPECIAL_TOKENS)))


def byte_level_bpe(corpus: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """Byte-level BPE, trained on the beginnings of the texts of `corpus`; it can encode any text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(["user\n", "assistant\n", "system\n", *_bounded(corpus)], trainer)
    return bpe


def _bounded(corpus: Iterable[str]) -> Iterator[str]:
    left_chars = MAX_CORPUS_CHARS
    for text in corpus:
        yield (start := text[: min(MAX_TEXT_CHARS, left_chars)])
        left_chars -= len(start)


def with_chat_tokens(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    """Tokenizer with Qwen's special tokens and chat template on top of any BPE vocabulary."""
    bpe.add_special_tokens(list(SPECIAL_TOKENS))
    special: dict[str, Any] = {SPECIAL_TOKENS_KEY: list(SPECIAL_TOKENS)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        **special,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_image_processor(patch_size_px: int) -> Any:
    """Qwen's image processor with this patch size and limits on the image area that suit a small model."""
    return ImageProcessor(
        patch_size=patch_size_px,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": (2 * patch_size_px) ** 2, "longest_edge": 1 << 20},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def _build_network(
    settings: TinyModel, fixed: FixedSizes, tokenizer: PreTrainedTokenizerFast, seed: int
) -> PreTrainedModel:
    """Network with random weights from `seed`; the state of torch's global generator does not change."""
    model_class = _transformers_class(settings.family, "ForConditionalGeneration")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: PreTrainedModel = model_class(_network_config(settings, fixed, tokenizer))
    generation = network.generation_config
    assert generation is not None
    generation.eos_token_id = tokenizer.eos_token_id
    generation.pad_token_id = tokenizer.pad_token_id
    _draw_decays(network, seed)
    network.eval()
    return network


def _draw_decays(network: PreTrainedModel, seed: int) -> None:
    """Sample the decay biases of gated delta nets so that most heads remember a whole prompt.

    With transformers' initial value of 1, heads forget nearly everything within one token, and the words of a question
    do not reach the last layer of a tiny model.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, bias_V in network.named_parameters():
        if name.endswith(".dt_bias"):
            low, high = map(math.log, STEP_RANGE)
            step_V = torch.empty_like(bias_V).uniform_(low, high, generator=generator).exp()
            with torch.no_grad():
                bias_V.copy_(step_V.expm1().log())  # its softplus is the step


def tiny_config(settings: TinyModel) -> Any:
    """Config of the network with the full vocabulary size of the settings; a small corpus may fill less of it."""
    config = _network_config(settings, FIXED, build_tokenizer([], settings.vocabulary_size))
    config.text_config.vocab_size = settings.vocabulary_size
    return config


def _network_config(settings: TinyModel, fixed: FixedSizes, tokenizer: PreTrainedTokenizerFast) -> Any:
    config_class = _transformers_class(settings.family, "Config")
    marks = {
        "image_token_id": IMAGE_PAD,
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    token_ids: dict[str, Any] = {key: token_id(tokenizer, mark) for key, mark in marks.items()}
    return config_class(
        text_config=_text_config(settings, fixed, tokenizer),
        vision_config=_vision_config(settings, fixed),
        tie_word_embeddings=True,
        **token_ids,
    )


def _transformers_class(family: str, end: str) -> Any:
    name = f"{CLASS_NAME[family]}{end}"
    if not hasattr(transformers, name):
        raise ModelError(
            f"model.tiny.family={family}: transformers {transformers.__version__} has no {name}; install a newer "
            "transformers, or choose another family"
        )
    return getattr(transformers, name)


def _text_config(settings: TinyModel, fixed: FixedSizes, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    is_hybrid = settings.family in HYBRID
    half = settings.head_dim // (8 if is_hybrid else 2)
    # time, height and width have the same shares as in the full-size families: 24/20/20 and 16/24/24 of 64
    interleaved = settings.family in ("qwen3_vl", "qwen3_vl_moe", *HYBRID)
    side = half * (20 if interleaved else 24) // 64
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [half - 2 * side, side, side],
    }
    if interleaved:
        rope["mrope_interleaved"] = True
    if is_hybrid:
        rope["partial_rotary_factor"] = 0.25
    parts: dict[str, Any] = _delta_nets(settings) if is_hybrid else {}
    if settings.family.endswith("_moe"):
        parts |= {
            "moe_intermediate_size": settings.intermediate_size,
            "num_experts": fixed.num_experts,
            "num_experts_per_tok": fixed.experts_per_token,
        }
    if settings.family == "qwen3_vl_moe":
        # as in hub configs: transformers always normalises the weights to 1, vLLM only if this key is set
        parts |= {"norm_topk_prob": True}
    # transformers' Qwen3.5-MoE has no MLPs besides its experts
    size = "shared_expert_intermediate_size" if settings.family == "qwen3_5_moe" else "intermediate_size"
    parts |= {size: fixed.shared_expert_size if settings.family == "qwen3_5_moe" else settings.intermediate_size}
    return parts | {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_kv_heads,
        "head_dim": settings.head_dim,
        "max_position_embeddings": 4096,
        **rope_fields(rope),
        # the delta rule solves triangular systems, which amplify rounding more if keys are similar
        "initializer_range": fixed.init_std / 2 if is_hybrid else fixed.init_std,
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
    }


def _delta_nets(settings: TinyModel) -> dict[str, Any]:
    """Fields of a text config with delta nets, whose heads have half the width of attention heads."""
    last = settings.num_layers - 1
    has_attention = [(index + 1) % FULL_ATTENTION_EVERY == 0 or index == last for index in range(last + 1)]
    return {
        "layer_types": ["full_attention" if each else "linear_attention" for each in has_attention],
        "linear_num_key_heads": settings.num_heads,
        "linear_num_value_heads": 2 * settings.num_heads,
        "linear_key_head_dim": settings.head_dim // 2,
        "linear_value_head_dim": settings.head_dim // 2,
    }


def _vision_config(settings: TinyModel, fixed: FixedSizes) -> dict[str, Any]:
    shared = {
        "depth": fixed.vision_depth,
        "num_heads": fixed.vision_heads,
        "patch_size": fixed.patch_size_px,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "initializer_range": fixed.init_std,
    }
    width = fixed.vision_hidden_size
    if settings.family == "qwen2_vl":
        # SGLang reads the number of channels under its name in hub files, not under transformers' name
        return shared | {"embed_dim": width, "hidden_size": settings.hidden_size, "mlp_ratio": 2, "in_chans": 3}
    shared |= {"hidden_size": width, "intermediate_size": 2 * width, "out_hidden_size": settings.hidden_size}
    if settings.family == "qwen2_5_vl":
        window = 4 * fixed.patch_size_px
        return shared | {"window_size": window, "fullatt_block_indexes": [fixed.vision_depth - 1]}
    side = settings.image_side_px // fixed.patch_size_px
    deepstack = {} if settings.family in HYBRID else {"deepstack_visual_indexes": [0]}
    return shared | {"num_position_embeddings": side * side} | deepstack


def chat_template(family: str) -> str:
    """The chat template of a tiny model."""
    if family not in _FORM_OF_FAMILY:
        return CHAT_TEMPLATE
    messages = CHAT_TEMPLATE.replace(_BEGIN, _BEGIN_WITH_RESULTS).replace(_END, _END_WITH_RESULTS)
    return _LIST.replace("FORM", _FORMS[_FORM_OF_FAMILY[family]]) + messages
