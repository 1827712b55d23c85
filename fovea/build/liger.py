"""Whether Liger's kernels run (`train.backend.liger_kernels`)."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from fovea.config.run import Config

LIGER = "liger_kernel"


def has_liger() -> bool:
    """Whether the package is installed."""
    return find_spec(LIGER) is not None


def runs_liger(config: Config, device: torch.device) -> bool:
    """Whether Liger's kernels run on this device; `auto`: on CUDA, where they are installed."""
    setting = config.train.backend.liger_kernels
    return device.type == "cuda" and has_liger() if setting == "auto" else setting
