"""Model folders that hold a config.json alone, with the sizes of published models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from fovea.config.loading import load_config
from fovea.config.recipes import read_yaml
from fovea.config.run import Config
from fovea_tools.plan.model_sizes import ModelSizes, model_sizes
from fovea_tools.plan.plan import with_settings


def text_of(
    *, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int, rope: dict[str, Any], **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "rope_parameters": {"rope_type": "default", **rope},
        **more,
    }


ROPE = {"rope_theta": 1e6, "mrope_section": [16, 24, 24]}
QWEN2_5_VL_7B: dict[str, Any] = {
    "text_config": text_of(hidden=3584, mlp=18944, layers=28, heads=28, kv_heads=4, vocabulary=152064, rope=ROPE),
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "tie_word_embeddings": False,
}
"""Qwen/Qwen2.5-VL-7B-Instruct: 8,292,166,656 parameters in its safetensors index (16,584,333,312 bytes of bfloat16)."""

TIED = {"tie_word_embeddings": True}
QWEN2_5_VL_3B: dict[str, Any] = {
    "text_config": text_of(
        hidden=2048, mlp=11008, layers=36, heads=16, kv_heads=2, vocabulary=151936, rope=ROPE, **TIED
    ),
    "vision_config": QWEN2_5_VL_7B["vision_config"] | {"out_hidden_size": 2048},
    **TIED,
}
"""Qwen/Qwen2.5-VL-3B-Instruct, by its config.json."""

QWEN2_VL_7B: dict[str, Any] = QWEN2_5_VL_7B | {
    "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "num_heads": 16}
}
"""Qwen/Qwen2-VL-7B-Instruct: 8,291,375,616 parameters in its safetensors index (16,582,751,232 bytes of bfloat16)."""


def qwen3_vl(hidden: int, mlp: int, layers: int, heads: int) -> dict[str, Any]:
    rope = {"rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    sizes = {"hidden": hidden, "mlp": mlp, "layers": layers, "heads": heads}
    return {
        "text_config": text_of(**sizes, kv_heads=8, head_dim=128, vocabulary=151936, rope=rope, **TIED),
        "vision_config": {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": hidden,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        "tie_word_embeddings": True,
    }


QWEN3_VL_2B, QWEN3_VL_4B = qwen3_vl(2048, 6144, 28, 16), qwen3_vl(2560, 9728, 36, 32)


def _untied(sizes: dict[str, Any], **vision: object) -> dict[str, Any]:
    return {
        "text_config": sizes["text_config"] | {"tie_word_embeddings": False},
        "vision_config": sizes["vision_config"] | vision,
        "tie_word_embeddings": False,
    }


QWEN3_VL_8B = _untied(
    qwen3_vl(4096, 12288, 36, 32),
    depth=27,
    hidden_size=1152,
    intermediate_size=4304,
    deepstack_visual_indexes=[8, 16, 24],
)
"""Qwen/Qwen3-VL-8B-Instruct: 8,767,123,696 parameters in its safetensors index (17,534,247,392 bytes of bfloat16)."""


def qwen3_5(hidden: int, mlp: int, *, tied: bool, **vision: object) -> dict[str, Any]:
    """transformers' defaults are the other sizes of the 9B."""
    return {
        "text_config": {
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "linear_num_key_heads": 16,
            "tie_word_embeddings": tied,
        },
        "vision_config": {"out_hidden_size": hidden, **vision},
        "tie_word_embeddings": tied,
    }


QWEN3_5_4B = qwen3_5(2560, 9216, tied=True, depth=24, hidden_size=1024, intermediate_size=4096)
QWEN3_5_9B = qwen3_5(4096, 12288, tied=False)


ROPE_OF_SMOLVL = {"rope_theta": 1e5, "mrope_section": [8, 12, 12]}
SMOLVL: dict[str, Any] = {
    "text_config": text_of(
        hidden=576, mlp=1536, layers=30, heads=9, kv_heads=3, vocabulary=49152, rope=ROPE_OF_SMOLVL, **TIED
    ),
    "vision_config": {"depth": 2, "embed_dim": 64, "hidden_size": 576, "mlp_ratio": 4, "num_heads": 4},
    **TIED,
}
"""HuggingFaceTB/SmolLM2-135M-Instruct with the tower of `python -m examples.talk smolvl`."""


def folder_of(folder: Path, sizes: dict[str, Any]) -> Path:
    """A folder with the config.json of these sizes, and no weights."""
    vision = sizes["vision_config"]
    family = "Qwen3VL"
    if "linear_num_key_heads" in sizes["text_config"]:
        family = "Qwen3_5"  # which transformers 4.57, that of Megatron's tests, does not have
    elif "embed_dim" in vision or "window_size" in vision:
        family = "Qwen2VL" if "embed_dim" in vision else "Qwen2_5_VL"
    getattr(transformers, f"{family}Config")(**sizes).save_pretrained(folder)
    return folder


FEW_PROMPTS = "rollout.prompts_per_step=64"
"""Micro-batches are dealt anew in every plan that an advice tries."""
RECIPES = Path(__file__).parents[3] / "recipes"


def wide(family: str) -> dict[str, int]:
    """Sizes at which activations are more than what a plan leaves out."""
    return {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 256}


_SIZES: dict[str, ModelSizes] = {}
"""Of published(), by the model's settings without its path: the network takes a second to make."""


def published(folder: Path, *overrides: str) -> tuple[Config, ModelSizes]:
    path = f"model.path={folder_of(folder, QWEN2_5_VL_7B)}"
    config = load_config([RECIPES / "geo3k_qwen2_5_vl_7b.yaml"], [path, *overrides])
    return config, sizes_of_published(config)


def sizes_of_published(config: Config) -> ModelSizes:
    """The sizes of Qwen2.5-VL-7B with the settings of a `published` config."""
    model = config.model.model_dump_json(exclude={"path"})
    if model not in _SIZES:
        _SIZES[model] = model_sizes(config)
    return _SIZES[model]


def with_words(config: Config, words: Sequence[str]) -> Config:
    pairs = (word.split("=") for word in words)
    return with_settings(config, {key: read_yaml(value, key) for key, value in pairs})
