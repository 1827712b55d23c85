"""Construction of the embedded engine from its settings, or of the plain one for a network without a fast forward."""

from __future__ import annotations

from collections.abc import Collection

from fovea.config.backends import EmbeddedSettings
from fovea.models.activation_tape import Tape
from fovea.models.policy_network import PolicyNetwork
from fovea.models.processor import Processor
from fovea.models.vlm import VLM
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.rollout.embedded.plain import PlainEngine
from fovea.rollout.embedded.tuning import Tuning
from fovea_gym.errors import ConfigError


def make_engine(
    settings: EmbeddedSettings,
    processor: Processor,
    vlm: PolicyNetwork,
    tape: Tape | None = None,
    synced: Collection[str] = (),
    can_free_memory: bool = False,
) -> EmbeddedEngine | PlainEngine:
    """Make the engine that samples with this network in this process: the embedded one if it can run it, else plain.

    `synced` names the weights that every weight sync sends: the embedded engine frees their memory while it sleeps.
    With `can_free_memory`, an update that runs out of memory frees the engine's memory and continues.
    """
    int8 = settings.decode_weights == "int8"
    device = vlm.device
    if int8 and device.type != "cpu":
        raise ConfigError(
            f"rollout.engine.decode_weights=int8, but the model is on {device.type}, and 8-bit decoding runs only "
            "on CPUs; set rollout.engine.decode_weights=exact"
        )
    if not isinstance(vlm, VLM):
        if int8:
            raise ConfigError(
                "rollout.engine.decode_weights=int8, but the engine runs transformers' own forward (model.fast_path); "
                "set rollout.engine.decode_weights=exact"
            )
        return PlainEngine(vlm, processor, max_batch_tokens=settings.max_batch_tokens)
    return EmbeddedEngine(
        vlm,
        processor,
        max_batch_tokens=settings.max_batch_tokens,
        tape=tape,
        tuning=Tuning(int8_decoding=int8),
        synced=synced,
        can_free_memory=can_free_memory,
    )
