"""The arguments of vLLM on which training rests, in this process and in servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRAINED_ON: Mapping[str, Any] = {
    "trust_remote_code": False,
    # stop tokens and sampling come with every request
    "generation_config": "vllm",
    # of the distribution that is drawn from (decision 018)
    "logprobs_mode": "processed_logprobs",
    # pixels come normalised, and vLLM would normalise them once more
    "mm_device_do_normalize": False,
    # images come processed: there is nothing to keep
    "mm_processor_cache_gb": 0,
    "enable_prefix_caching": True,
}
