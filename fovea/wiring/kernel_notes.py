"""Notes on kernels for the start of a run on a GPU: which were chosen, and which it refuses.

A refusal costs a factor and no error, and so does a package that is not installed.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from fovea.config.backends import EmbeddedEngine as EmbeddedSettings
from fovea.config.run import Config
from fovea.models.policy_network import PolicyNetwork
from fovea.models.vlm import VLM
from fovea.rollout.embedded.tuning import decoding_note
from fovea.utils.installing import pip_install

LIGER = "liger_kernel"


def has_liger() -> bool:
    """True if the package is installed."""
    return find_spec(LIGER) is not None


def runs_liger(config: Config, device: torch.device) -> bool:
    """True if Liger's kernels run on this device; `auto`: on CUDA, where they are installed."""
    setting = config.train.backend.liger_kernels
    return device.type == "cuda" and has_liger() if setting == "auto" else setting


def kernel_notes(config: Config, vlm: PolicyNetwork) -> tuple[str, ...]:
    """A line for each choice of kernels, and each refusal with its own message and what runs instead; none on CPUs."""
    if not isinstance(vlm, VLM) or vlm.device.type == "cpu":
        return ()
    chosen = liger_note(runs_liger(config, vlm.device)) if config.train.backend.liger_kernels == "auto" else []
    if isinstance(config.rollout.engine, EmbeddedSettings):
        chosen.append(decoding_note(vlm.text_config, vlm.device, vlm.dtype))
    return (*chosen, *(f"slow: {note}" for note in vlm.slow_kernels()))


def liger_note(runs: bool) -> list[str]:
    """Note on what `train.backend.liger_kernels=auto` chose."""
    if runs:
        return ["train.backend.liger_kernels=auto: Liger's kernels run RMS norm, SwiGLU and rotary positions"]
    assert not has_liger(), "Liger is installed, but does not run on this GPU"
    return [
        f"slow: train.backend.liger_kernels=auto: {LIGER} is not installed, and torch's operators make more passes "
        f"over memory for RMS norm, SwiGLU and rotary positions; {pip_install('liger')}"
    ]
