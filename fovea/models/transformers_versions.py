"""Differences between transformers 4.57 and 5 in names and layouts, each of them behind one name.

Fovea is written for transformers 5, but megatron-bridge requires a version below 5, so an environment with it has 4.57.
The rest of the package uses these names and does not check versions. Delete this file when the bridge supports
transformers 5.

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
"""Functions that derive a vision tower's inputs from image sizes; None for 4.57, whose towers do it internally."""

SPECIAL_TOKENS_KEY = "additional_special_tokens" if OLD else "extra_special_tokens"
"""Tokenizer argument that lists the special tokens without a role (such as end of sequence)."""


def image_processor_class(name: str) -> Any:
    """transformers' image processor of this name, in the variant that needs only PIL and numpy, not torchvision."""
    if not OLD:
        # for Idefics 3, 5.17 exports a placeholder that requires torchvision; its module has the real class
        return pkgutil.resolve_name(f"{getattr(transformers, f'{name}Pil').__module__}:{name}Pil")
    found = getattr(transformers, name)
    return _with_its_size(found) if name == "Qwen2VLImageProcessor" else found


def _with_its_size(image_processor: Any) -> Any:
    """Qwen's image processor of 4.57, changed to use `size`, which it ignores: it would resize to other limits."""

    def init(self: Any, *, size: Any = None, min_pixels: Any = None, max_pixels: Any = None, **options: Any) -> None:
        limits = dict(size or {})
        smallest, largest = min_pixels or limits.get("shortest_edge"), max_pixels or limits.get("longest_edge")
        image_processor.__init__(self, size=size, min_pixels=smallest, max_pixels=largest, **options)

    return type(image_processor.__name__, (image_processor,), {"__init__": init})  # files name the class


def disable_input_require_grads(network: Any) -> None:
    """Remove the hooks that make embeddings require gradients, if there are any: 4.57 raises if there are none."""
    if not OLD or hasattr(network, "_require_grads_hook"):
        network.disable_input_require_grads()


def rope_fields(rope: dict[str, Any]) -> dict[str, Any]:
    """Fields of a text config for these parameters of rotary positions (including `rope_theta`)."""
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
    """Set the fields that version 5 wrote under new names; 4.57 would use its defaults instead: a different model."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    named = rope_fields(rope) if rope else {}
    if hasattr(text, "num_local_experts"):
        named["num_experts"] = text.num_local_experts
    if getattr(text, "architectures", None) is None:
        # Qwen2.5-VL returns its language model's architectures, which version 5 does not write
        named["architectures"] = vars(config)["architectures"]
    for name, value in named.items():
        setattr(text, name, value)


def load_tokenizer(path: str, written: Mapping[str, Any], **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id, written by either version; `written` is its tokenizer_config.json."""
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
        # "dynamic" frequencies change only beyond `max_position_embeddings`, which no row reaches; transformers would
        # look for the longest position and so wait for the GPU, which breaks the capture of a CUDA graph
        dynamic = rotary.rope_type == "dynamic"
        forward = partial(inspect.unwrap(type(rotary).forward), rotary) if dynamic else rotary
        cos, sin = forward(like, positions_3N)
        return cos[0], sin[0]
    cos, sin = rotary(like, positions_3N[:, None])
    if cos.dim() == 3:
        return cos[0], sin[0]
    # 4.57 keeps the three axes of Qwen2-VL and Qwen2.5-VL separate, and its attention picks each axis's sections
    sections = 2 * text_config.rope_scaling["mrope_section"]
    picked = [
        torch.cat([part[index % 3, 0] for index, part in enumerate(table.split(sections, dim=-1))], dim=-1)
        for table in (cos, sin)
    ]
    return picked[0], picked[1]


@dataclass(frozen=True, slots=True)
class DeltaFunctions:
    """Functions of transformers' gated delta nets, with the signatures of the packages that they replace."""

    convolve: Callable[..., Tensor]
    chunks: Callable[..., tuple[Tensor, Tensor]]
    """The delta rule over chunks of tokens."""
    step: Callable[..., tuple[Tensor, Tensor]]
    """The delta rule token by token."""


def delta_functions() -> DeltaFunctions:
    """The functions that transformers has picked for this machine."""
    # imported here, so that rendering prompts does not load network classes
    qwen3_5: Any = pkgutil.resolve_name("transformers.models.qwen3_5.modeling_qwen3_5")
    return DeltaFunctions(
        qwen3_5.causal_conv1d_fn, qwen3_5.torch_chunk_gated_delta_rule, qwen3_5.torch_recurrent_gated_delta_rule
    )


def plain_delta_functions() -> DeltaFunctions:
    """The same functions in plain torch, even if kernels are installed."""
    picked = delta_functions()
    return DeltaFunctions(*map(inspect.unwrap, (picked.convolve, picked.chunks, picked.step)))


EXPERTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
"""Suffixes of the names of expert weights. Hub files hold those of Qwen3-VL-MoE as [experts, inputs, outputs] and those
of Qwen3.5-MoE as [experts, outputs, inputs]. transformers 5 holds both in the latter layout, reads either, and writes
its own: for Qwen3.5-MoE one tensor per expert. vLLM, SGLang and LMDeploy only read the layout of the hub files."""


def is_turned(name: str, model_type: str) -> bool:
    """True if hub files hold this weight in another layout than the installed transformers does."""
    return model_type == "qwen3_vl_moe" and name.endswith(EXPERTS) and not OLD


def experts_tensor(stored: Tensor) -> Tensor:
    """All experts of Qwen3-VL-MoE as [experts, outputs, inputs]; modules of 4.57 have the layout of the hub files."""
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
