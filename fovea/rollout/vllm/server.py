"""The command that starts vLLM's OpenAI-compatible server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fovea.rollout.server import Launch, ModelServer, checked, environment
from fovea_gym.settings.base import over
from fovea_gym.utils.launch import module_command

TRAINED_ON: Mapping[str, Any] = {
    "trust_remote_code": False,
    # every request carries its own stop tokens and sampling parameters
    "generation_config": "vllm",
    # log-probs of the distribution that tokens are sampled from (decision 018)
    "logprobs_mode": "processed_logprobs",
    # pixels arrive normalized, and vLLM would normalize them once more
    "mm_device_do_normalize": False,
    # images arrive processed, so there is nothing to cache
    "mm_processor_cache_gb": 0,
    "enable_prefix_caching": True,
}


MODULE = "vllm.entrypoints.launchers.api_server.entry"
MIDDLEWARE = ("fovea.rollout.vllm.servers.SameSync", "fovea.rollout.server_guard.Guard")
"""ASGI middleware, innermost first: the last one refuses requests without the key."""
WEIGHTS_DIR_ENV = "FOVEA_WEIGHTS_DIR"
DEV_MODE_ENV = "VLLM_SERVER_DEV_MODE"
"""Enables the paths through which a trainer pauses a server and calls its workers."""
NOT_INHERITED = ("VLLM_API_KEY", DEV_MODE_ENV, "VLLM_ENABLE_V1_MULTIPROCESSING")
"""Variables of this process that a server does not inherit. This package sets the last one for an engine in this
process, but a server runs its engine in a separate one."""


FOR_TRAINING: Mapping[str, Any] = {
    **TRAINED_ON,
    "enable_scale_out": True,  # adds the path that takes and returns token ids
    "worker_extension_cls": "fovea.rollout.vllm.server_worker.FolderReceiver",
}


def launch(server: ModelServer) -> Launch:
    """Build the command and environment of a server; ConfigError for an argument that Fovea sets."""
    fixed: dict[str, Any] = {
        "model": str(server.folder),
        "served_model_name": server.name,
        "host": server.host,
        "port": server.port,
        "trust_remote_code": False,
        "middleware": MIDDLEWARE,
        "disable_uvicorn_access_log": True,
        "uvicorn_log_level": "warning",
    }
    defaults: dict[str, Any] = {
        "dtype": server.dtype,
        # Fovea trains on images only: without a limit of 0, vLLM reserves memory for videos
        "limit_mm_per_prompt": {"video": 0},
        # vLLM's CPU build (0.32) fails on a seeded request whose prompt is prefilled in chunks
        "enable_chunked_prefill": None if torch.cuda.is_available() else False,
    }
    if server.weights_dir is not None:
        fixed |= FOR_TRAINING
    own = environment(server, without=NOT_INHERITED)
    if server.weights_dir is not None:
        own |= {WEIGHTS_DIR_ENV: str(server.weights_dir.resolve()), DEV_MODE_ENV: "1"}
    arguments = over(defaults, checked(server, fixed)) | fixed
    return Launch(command=[*module_command(MODULE), *flags(arguments)], environment=own)


def flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Convert arguments to flags of vLLM's command line; None leaves an argument to vLLM."""
    for key, value in arguments.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, dict):
            yield from (f"--{flag}", json.dumps(value))
        elif isinstance(value, tuple):  # a repeated flag
            for each in value:
                yield from (f"--{flag}", str(each))
        elif isinstance(value, list):
            yield from (f"--{flag}", *map(str, value))
        elif value is not None:
            yield from (f"--{flag}", str(value))
