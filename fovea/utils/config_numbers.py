"""Ranges of the numbers in a model's JSON files, checked before transformers builds anything from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from fovea.errors import ModelError

LAYERS, HEADS, WIDTH, PLACES = 2_000, 65_536, 2**24, 2**31
COUNTS: dict[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "depth", "full_attention_interval"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads"), HEADS),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), HEADS),
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "moe_intermediate_size", "embed_dim", "out_hidden_size"), WIDTH
    ),
    **dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"), WIDTH),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("n_embd", "d_model", "d_ff", "d_kv", "encoder_ffn_dim", "decoder_ffn_dim"), WIDTH),
    "r": HEADS,  # rank of an adapter
    **dict.fromkeys(("num_labels", "n_positions", "n_ctx"), WIDTH),
    **dict.fromkeys(("vocab_size", "num_position_embeddings", "mm_tokens_per_image"), WIDTH),
    **dict.fromkeys(("num_channels", "in_channels", "in_chans"), HEADS),
    **dict.fromkeys(("patch_size", "spatial_patch_size", "temporal_patch_size", "image_size", "window_size"), HEADS),
    **dict.fromkeys(("spatial_merge_size", "merge_size", "pooling_kernel_size"), HEADS),
    **dict.fromkeys(("height", "width"), HEADS),
    **dict.fromkeys(("max_position_embeddings", "shortest_edge", "longest_edge", "min_pixels", "max_pixels"), PLACES),
}
"""Keys of whole numbers of at least 1, each with the largest value that a network or picture can have."""
ABOVE_ZERO = (
    *("rope_theta", "rope_local_base_freq"),
    *("image_std", "rescale_factor", "mlp_ratio"),
    *("downsample_ratio", "partial_rotary_factor", "scale_factor"),
)
"""Keys of numbers above zero, in addition to keys that end in `eps`."""
ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Ids that some configs set to -1, which means none."""


def check_numbers(where: str, file: str, content: Mapping[str, Any]) -> None:
    """ModelError for a config number that no model can have; the message begins with `where`."""
    for above, each in _mappings(content):
        # latent attention has other keys for the width of a head
        for key, value in ((k, v) for k, v in each.items() if k != "head_dim" or "kv_lora_rank" not in each):
            wanted = next((wanted for number in _leaves(value) if (wanted := _wanted(above, key, number))), None)
            if wanted:
                _refuse(where, file, f"{above}{key}={value!r}", wanted)
        heads, kv_heads = (each.get(key) for key in ("num_attention_heads", "num_key_value_heads"))
        if heads and kv_heads and heads % kv_heads:
            _refuse(where, file, f"{above}num_key_value_heads={kv_heads}", f"a divisor of num_attention_heads={heads}")
        smallest, largest = each.get("shortest_edge"), each.get("longest_edge")
        if smallest and largest and smallest > largest:
            _refuse(where, file, f"{above}shortest_edge={smallest}", f"at most longest_edge={largest}")


def _refuse(where: str, file: str, given: str, wanted: str) -> None:
    raise ModelError(f"{where}: {given} in its {file} must be {wanted}; correct it, or download the model again")


def _wanted(above: str, key: str, value: Any) -> str | None:
    """The allowed range of a value outside its range; None for a value inside it, or for a key without a range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_whole = is_number and isinstance(value, int)
    wanted, fits = "", True
    if key in COUNTS and not (key == "vocab_size" and "vision" in above):
        wanted, fits = f"a whole number from 1 to {COUNTS[key]}", is_whole and 1 <= value <= COUNTS[key]
    elif is_number and not math.isfinite(value):
        # the limits of time steps in state-space models may be infinite
        wanted, fits = "a finite number", "limit" in key
    elif is_number and key.endswith(("_token_id", "_token_index")):
        low = -1 if key in ENDS else 0
        wanted, fits = f"a whole number from {low}", is_whole and low <= value < PLACES
    elif is_number and (key in ABOVE_ZERO or key.endswith("eps")):
        wanted, fits = "above 0", value > 0
    elif is_number and "dropout" in key:
        wanted, fits = "from 0 to below 1", 0 <= value < 1
    elif is_number and key == "initializer_range":
        wanted, fits = "0 or more", value >= 0
    return None if fits else wanted


def _mappings(value: Any, above: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The mapping and all nested mappings, each with the prefix of its keys' dotted names."""
    if isinstance(value, Mapping):
        yield above, value
        for key, entry in value.items():
            yield from _mappings(entry, f"{above}{key}.")


def _leaves(value: Any) -> Iterator[Any]:
    """The numbers and texts of a value and of its lists; nothing for a mapping, whose keys have their own ranges."""
    if isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif value is not None and not isinstance(value, Mapping):
        yield value
