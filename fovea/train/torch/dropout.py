"""Random numbers of dropout (`model.lora.dropout`), the only ones that a pass of the trainer draws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fovea.train.ranks import Ranks


@contextmanager
def dropout_seed(step: int, ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Seed torch's generators in this context by step and rank, and put them back behind it.

    By the counters alone, so that a resumed run drops what an uninterrupted one does; by rank, so that each draws masks
    of its own for its rows.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(np.random.SeedSequence((step, ranks.rank)).generate_state(1)[0]))
        yield
