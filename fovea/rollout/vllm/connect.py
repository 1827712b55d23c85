"""Connection to the servers of `rollout.engine=vllm_servers`, from its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY

from fovea.config.backends import VllmServersSettings as Settings
from fovea.config.model import Model
from fovea.models.processor import Processor
from fovea.rollout.checks import fitting_length
from fovea.rollout.outputs import CompletionText
from fovea.rollout.server_guard import made_key
from fovea.rollout.vllm.arguments import check_model
from fovea.rollout.vllm.inputs import VllmTranslator
from fovea.rollout.vllm.servers import ServerFacts, VllmServers
from fovea.rollout.vllm.sync_folder import SyncFolder
from fovea.rollout.vllm.weights import ExpectedWeights
from fovea_gym.errors import ConfigError, first_line, named
from fovea_gym.utils.http_json import CallBounds, JsonServer

REQUESTS_AT_ONCE = 256
"""Maximum number of concurrent requests to one server: as many as vLLM decodes at once by default."""


def connect(settings: Settings, model: Model, processor: Processor, *, max_model_len: int) -> VllmServers:
    """Wait for all servers, and check that they are suitable; ConfigError or EngineError if one is not.

    `max_model_len` is the maximum length of a prompt with its completion, in tokens; the model's positions cap it.
    """
    checked = check_model(processor, model, settings.name)
    max_model_len = fitting_length(checked, None, max_model_len, model=model.name)
    # vLLM reads the configuration of the model's folder, without starting an engine
    arguments = EngineArgs(
        model=model.path,
        revision=model.revision,
        dtype=model.dtype,
        max_model_len=max_model_len,
        trust_remote_code=False,
    )
    with named(lambda error: ConfigError(f"rollout.engine=vllm_servers: vLLM refuses the model: {first_line(error)}")):
        config: Any = arguments.create_model_config()
    fields = MULTIMODAL_REGISTRY.create_processor(config)._get_mm_fields_config
    expected = ExpectedWeights(config, is_sharded=False)
    bounds = CallBounds(timeout_seconds=settings.timeout_seconds, calls_at_once=REQUESTS_AT_ONCE)
    weights_dir = Path(settings.weights_dir).expanduser()
    headers = {"authorization": f"Bearer {made_key(weights_dir)}"}
    return VllmServers(
        [JsonServer(url, bounds, headers) for url in settings.servers],
        ServerFacts(
            dtype=str(config.dtype).removeprefix("torch."),
            max_model_len=max_model_len,
            max_images=settings.limit_mm_per_prompt.image,
        ),
        expected,
        SyncFolder(weights_dir, expected.dtype, expected.vllm_name),
        VllmTranslator(
            fields=lambda tensors: fields(tensors, {}),
            image_token_id=processor.family.image_token_id,
            stop_ids=processor.stop_ids,
            banned_ids=processor.banned_ids,
        ),
        CompletionText(processor.tokenizer, processor.stop_ids),
        restart_seconds=settings.restart_seconds,
    )
