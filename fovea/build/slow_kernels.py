"""What a GPU refuses of the kernels that a run is made for: said at its start, since it costs a factor and no error."""

from __future__ import annotations

from fovea.config.backends import EmbeddedEngine as EmbeddedSettings
from fovea.config.run import Config
from fovea.models.policy_network import PolicyNetwork
from fovea.models.vlm import VLM
from fovea.rollout.embedded.tuning import slow_decoding_note


def slow_kernels(config: Config, vlm: PolicyNetwork) -> tuple[str, ...]:
    """One line for each kernel that is refused, with its own message and what runs instead; none on CPUs."""
    if not isinstance(vlm, VLM) or vlm.device.type == "cpu":
        return ()
    notes = vlm.slow_kernels()
    if isinstance(config.rollout.engine, EmbeddedSettings):
        note = slow_decoding_note(vlm.text_config, vlm.device, vlm.dtype)
        notes += [] if note is None else [note]
    return tuple(notes)
