"""Differences of transformers 4.57 and 5 in names and layouts, behind one name each.

Fovea is written for transformers 5. megatron-bridge wants a version below 5, so that an environment with it has 4.57:
everything else in the package reads these names and knows of no versions. Delete this file when the bridge
takes transformers 5.

Axes: `N` tokens, `D` width of a head, 3 = time, height, width.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fovea.models.model_files import GENERIC

OLD = int(transformers.__version__.split(".")[0]) < 5
"""True below transformers 5."""

vision_utils: Any = None if OLD else importlib.import_module("transformers.vision_utils")
"""Functions by which a vision tower's inputs are derived from the sizes of images; None where the tower calls none."""

SPECIAL_TOKENS_KEY = "additional_special_tokens" if OLD else "extra_special_tokens"
"""Argument of a tokenizer that lists its special tokens besides those with a role."""


def image_processor_class(name: str) -> Any:
    """transformers' image processor of this name that needs PIL and numpy only, not torchvision."""
    if not OLD:
        # for Idefics 3, 5.17 exports a placeholder that asks for torchvision; the module has the class itself
        return pkgutil.resolve_name(f"{getattr(transformers, f'{name}Pil').__module__}:{name}Pil")
    found = getattr(transformers, name)
    return _with_its_size(found) if name == "Qwen2VLImageProcessor" else found


def _with_its_size(image_processor: Any) -> Any:
    """Qwen's image processor of 4.57, which takes no heed of `size`: every image was resized to other limits."""

    def init(self: Any, *, size: Any = None, min_pixels: Any = None, max_pixels: Any = None, **options: Any) -> None:
        limits = dict(size or {})
        smallest, largest = min_pixels or limits.get("shortest_edge"), max_pixels or limits.get("longest_edge")
        image_processor.__init__(self, size=size, min_pixels=smallest, max_pixels=largest, **options)

    return type(image_processor.__name__, (image_processor,), {"__init__": init})  # files name the class


def disable_input_require_grads(network: Any) -> None:
    """Remove the hooks by which embeddings require gradients, if there are any: without one, 4.57 raises."""
    if not OLD or hasattr(network, "_require_grads_hook"):
        network.disable_input_require_grads()


def rope_fields(rope: dict[str, Any]) -> dict[str, Any]:
    """Fields of a text config for these parameters of rotary positions (`rope_theta` among them)."""
    if not OLD:
        return {"rope_parameters": rope}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def load_config(path: str, **options: Any) -> Any:
    """The config of a model folder or hub id, written by either version."""
    config = AutoConfig.from_pretrained(path, **options)
    if OLD:
        _read_as_new(config)
    return config


def _read_as_new(config: Any) -> None:
    """Set what version 5 wrote under other names; 4.57 keeps them and takes its own defaults, another model."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    named = rope_fields(rope) if rope else {}
    if hasattr(text, "num_local_experts"):
        named["num_experts"] = text.num_local_experts
    if getattr(text, "architectures", None) is None:
        # a Qwen2.5-VL answers with its language model's, which version 5 does not write
        named["architectures"] = vars(config)["architectures"]
    for name, value in named.items():
        setattr(text, name, value)


def load_tokenizer(path: str, written: Mapping[str, Any], **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id by either version; `written` is its tokenizer_config.json."""
    kind: Any = AutoTokenizer
    if OLD:
        extra = written.get("extra_special_tokens")
        if isinstance(extra, list):
            options |= {"extra_special_tokens": {}, SPECIAL_TOKENS_KEY: extra}
        if written.get("tokenizer_class") in GENERIC:
            kind = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(path, **options)
    return tokenizer


def rotary_tables(rotary: Any, text_config: Any, like: Tensor, positions_3N: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, D] of positions [3, N] of M-RoPE or [1, N], in the type and on the device of `like`."""
    if len(positions_3N) == 1:
        # "dynamic" frequencies change beyond `max_position_embeddings` only, which no row reaches, and transformers'
        # look for the longest position waits for a GPU, which ends the capture of a CUDA graph
        dynamic = rotary.rope_type == "dynamic"
        forward = partial(inspect.unwrap(type(rotary).forward), rotary) if dynamic else rotary
        cos, sin = forward(like, positions_3N)
        return cos[0], sin[0]
    cos, sin = rotary(like, positions_3N[:, None])
    if cos.dim() == 3:
        return cos[0], sin[0]
    # 4.57 leaves the three axes of Qwen2-VL and Qwen2.5-VL apart, and its attention picks each axis's sections
    sections = 2 * text_config.rope_scaling["mrope_section"]
    picked = [
        torch.cat([part[index % 3, 0] for index, part in enumerate(table.split(sections, dim=-1))], dim=-1)
        for table in (cos, sin)
    ]
    return picked[0], picked[1]


@dataclass(frozen=True, slots=True)
class DeltaFunctions:
    """Functions of transformers' gated delta nets, with the arguments of the packages that they stand for."""

    convolve: Callable[..., Tensor]
    chunks: Callable[..., tuple[Tensor, Tensor]]
    """The delta rule over chunks of tokens."""
    step: Callable[..., tuple[Tensor, Tensor]]
    """The delta rule token by token."""


def delta_functions() -> DeltaFunctions:
    """The functions that transformers has picked for this machine."""
    # here, so that what renders prompts only loads no network class
    qwen3_5: Any = pkgutil.resolve_name("transformers.models.qwen3_5.modeling_qwen3_5")
    return DeltaFunctions(
        qwen3_5.causal_conv1d_fn, qwen3_5.torch_chunk_gated_delta_rule, qwen3_5.torch_recurrent_gated_delta_rule
    )


def plain_delta_functions() -> DeltaFunctions:
    """The same functions in plain torch, also where kernels are installed."""
    picked = delta_functions()
    return DeltaFunctions(*map(inspect.unwrap, (picked.convolve, picked.chunks, picked.step)))


EXPERTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
"""Ends of the names of experts. Files hold Qwen3-VL-MoE's as [experts, inputs, outputs] and Qwen3.5-MoE's as [experts,
outputs, inputs]. transformers 5 holds the latter of both, reads what it meets and writes its own: of Qwen3.5-MoE a
tensor for each expert. vLLM, SGLang and LMDeploy read the layout of the files only."""


def is_turned(name: str, model_type: str) -> bool:
    """True if files of the hub hold a weight of such a model in another layout than this transformers does."""
    return model_type == "qwen3_vl_moe" and name.endswith(EXPERTS) and not OLD


def experts_tensor(stored: Tensor) -> Tensor:
    """A tensor of all experts of Qwen3-VL-MoE as [experts, outputs, inputs]; 4.57's modules have them as files do."""
    return stored.mT if OLD else stored


def experts_per_token(mlp: Any) -> int:
    """Number of experts that each token runs through in this layer of Qwen3-VL-MoE."""
    of = mlp if OLD else mlp.gate
    return int(of.top_k)


def tower_features(out: Any, *, deepstack: bool) -> list[Tensor]:
    """Visual tokens that a Qwen-VL vision tower returns, and its deepstack features, [visual tokens, D] each."""
    if not OLD:
        return [out.pooler_output, *(out.deepstack_features if deepstack else ())]
    return [out[0], *out[1]] if deepstack else [out]


def tower_options() -> dict[str, Any]:
    """Arguments of a vision tower's forward besides pixels and grids."""
    return {} if OLD else {"return_dict": True}
