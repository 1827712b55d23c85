"""Requests of `/inference/v1/generate`, vLLM's interface of token ids and processed images, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm import SamplingParams
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item

SENT = (
    "n",
    "temperature",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "logprobs",
    "detokenize",
)
"""Sampling parameters that `rollout.vllm.inputs.Translator` sets and a server takes."""


def generate_body(prompt: Mapping[str, Any], sampling: SamplingParams) -> dict[str, Any]:
    """The body of a request, from the same prompt and parameters that an engine in this process gets."""
    body: dict[str, Any] = {
        "token_ids": prompt["prompt_token_ids"],
        # those that vLLM has in the end, to be compared with ours
        "return_token_ids": True,
        # a bias of minus infinity is -Infinity, which Python's JSON has on both sides
        "sampling_params": {name: getattr(sampling, name) for name in SENT},
    }
    if "mm_kwargs" in prompt:
        places = prompt["mm_placeholders"]["image"]
        body["features"] = {
            "mm_hashes": {"image": list(prompt["mm_hashes"]["image"])},
            "mm_placeholders": {"image": [{"offset": each.offset, "length": each.length} for each in places]},
            "kwargs_data": {"image": [encode_mm_kwargs_item(item) for item in prompt["mm_kwargs"]["image"]]},
        }
    return body
