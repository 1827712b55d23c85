"""The command that starts SGLang's OpenAI-compatible server, a separate process (`rollout.sglang.server_process`)."""

from __future__ import annotations

import json
from typing import Any

import torch
from sglang.srt.server_args import ServerArgs
from transformers import AutoConfig

from fovea.config.backends import CPU_KV_CACHE_TOKENS
from fovea.rollout.checks import check_family, check_known, check_merge
from fovea.rollout.server import Launch, ModelServer, checked, environment
from fovea.rollout.sglang.arguments import CPU_ARGUMENTS, CPU_ENVIRONMENT, FAMILIES, check_vision
from fovea_gym.errors import ConfigError
from fovea_gym.utils.launch import module_command

PROCESS = "fovea.rollout.sglang.server_process"
SERVER_ENVIRONMENT = {
    # otherwise the health endpoint generates a completion before it answers
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # SGLang's Rust server would check neither the key nor the banned ids
    "SGLANG_RUST_SERVER": "0",
}


def launch(server: ModelServer) -> Launch:
    """Build the command and environment of a server; ConfigError for an argument that is unknown or set by Fovea."""
    if server.weights_dir is not None:
        raise ConfigError(
            "--for-training needs --engine vllm: SGLang's server cannot receive weight syncs; train with "
            "rollout.engine=sglang, which starts SGLang itself"
        )
    config = AutoConfig.from_pretrained(server.folder, trust_remote_code=False, local_files_only=True)
    check_family(config.model_type, FAMILIES, model=str(server.folder), setting="sglang", engine="SGLang")
    check_vision(config, str(server.folder))
    check_merge(config, model=str(server.folder), setting="sglang", engine="SGLang")
    fixed: dict[str, Any] = {
        "model_path": str(server.folder),
        "served_model_name": server.name,
        "host": server.host,
        "port": server.port,
        "trust_remote_code": False,
        # a single process and web server, since only this one checks the key and adds the banned ids
        "tokenizer_worker_num": 1,
        "enable_http2": False,
        # the warm-up is a request for which others would have to wait
        "skip_server_warmup": True,
    }
    given = checked(server, fixed)
    for key in given:
        check_known(key, ServerArgs.__struct_fields__, where=key, engine="SGLang", listed="SGLang's ServerArgs")
    on_cpu = given.get("device") == "cpu" or not torch.cuda.is_available()
    of_device = {"device": "cpu", "max_total_tokens": CPU_KV_CACHE_TOKENS, "disable_cuda_graph": True, **CPU_ARGUMENTS}
    defaults = {"log_level": "warning", "dtype": server.dtype, **(of_device if on_cpu else {})}
    return Launch(
        command=[*module_command(PROCESS), json.dumps(defaults | given | fixed)],
        environment=environment(server) | SERVER_ENVIRONMENT | (dict(CPU_ENVIRONMENT) if on_cpu else {}),
    )
