"""Heads and models whose largest logits are those of banned ids."""

from __future__ import annotations

import torch
from torch import Tensor

from fovea.models.tiny import TinyParts

TOLERANCE = 1e-5
"""Log-probs near -6 and relative gradients in float32."""
ACTIONS, WIDTH, VOCABULARY = 11, 16, 40
BANNED = (0, 3, 17, 37, 38, 39)
"""First, inside, and a tail."""


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head that favours banned ids, and targets that are not banned."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ACTIONS, WIDTH, generator=generator)
    head = torch.randn(VOCABULARY, WIDTH, generator=generator)
    head[list(BANNED)] *= 3
    allowed = torch.tensor([index for index in range(VOCABULARY) if index not in BANNED])
    targets = allowed[torch.randint(len(allowed), (ACTIONS,), generator=generator)]
    return hidden.requires_grad_(), head.requires_grad_(), targets


def favour_banned_ids(parts: TinyParts) -> None:
    """Give banned ids most of the probability of the whole vocabulary."""
    with torch.no_grad():
        rows = parts.network.get_input_embeddings().weight
        vectors = 0.7 * torch.randn(4, rows.shape[1], generator=torch.Generator().manual_seed(1))
        # each vector and its opposite: whatever the hidden state, some of them have large logits
        rows[list(parts.processor.banned_ids)] = torch.cat([vectors, -vectors])[:7]
