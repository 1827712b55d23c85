"""The process of vLLM's OpenAI-compatible server."""

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
    # stop tokens and sampling come with every request
    "generation_config": "vllm",
    # of the distribution that is sampled from (decision 018)
    "logprobs_mode": "processed_logprobs",
    # pixels come normalised, and vLLM would normalise them once more
    "mm_device_do_normalize": False,
    # images come processed: there is nothing to keep
    "mm_processor_cache_gb": 0,
    "enable_prefix_caching": True,
}


MODULE = "vllm.entrypoints.launchers.api_server.entry"
MIDDLEWARE = ("fovea.rollout.vllm.servers.SameSync", "fovea.rollout.server_guard.Guard")
"""Innermost first: a request without the key gets no further than the last."""
WEIGHTS_DIR_ENV = "FOVEA_WEIGHTS_DIR"
DEV_MODE_ENV = "VLLM_SERVER_DEV_MODE"
"""Opens the paths by which a trainer pauses a server and calls its workers."""
NOT_INHERITED = ("VLLM_API_KEY", DEV_MODE_ENV, "VLLM_ENABLE_V1_MULTIPROCESSING")
"""Of this process's environment. The last is set by this package for an engine in this process; a server has its engine
in a separate one."""


FOR_TRAINING: Mapping[str, Any] = {
    **TRAINED_ON,
    "enable_scale_out": True,  # token ids in and out
    "worker_extension_cls": "fovea.rollout.vllm.server_worker.FolderReceiver",
}


def launch(server: ModelServer) -> Launch:
    """The process of a server; ConfigError for an argument that is set here."""
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
        # models are trained on images here: without a limit of 0, vLLM keeps memory for videos
        "limit_mm_per_prompt": {"video": 0},
        # the CPU build fails on a seeded request whose prompt it has prefilled in part (0.32)
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
    """Arguments as vLLM's command line takes them; what is None is left to vLLM."""
    for key, value in arguments.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, dict):
            yield from (f"--{flag}", json.dumps(value))
        elif isinstance(value, tuple):  # an argument that is repeated
            for each in value:
                yield from (f"--{flag}", str(each))
        elif isinstance(value, list):
            yield from (f"--{flag}", *map(str, value))
        elif value is not None:
            yield from (f"--{flag}", str(value))
