"""Threads of a process that computes."""

from __future__ import annotations

import torch

from fovea.config.run import Config


def set_threads(config: Config) -> None:
    """Set the number of threads that the settings give torch."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
