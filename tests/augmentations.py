"""Views of pictures for tests, and the formulas of PAPO's and VPPO's authors, written out on padded tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fovea.data.augmentations import Mask, SeededAugmentation

MASK = SeededAugmentation(change=Mask(ratio=0.6, patch_px=14), seed=(0,))


def low_var_kl(logprobs_BT: Tensor, other_BT: Tensor) -> Tensor:
    kl_BT = (other_BT - logprobs_BT).clamp(-20.0, 20.0)
    return torch.clamp(kl_BT.exp() - kl_BT - 1, min=-10.0, max=10.0)


def authors_vppo(old_BT: Tensor, masked_BT: Tensor, mask_BT: Tensor, top_p: float, target_min: float) -> Tensor:
    """Factor of each token's advantage, by the steps of dp_actor.py over one mini-batch in one micro-batch."""
    factors_BT = torch.zeros(mask_BT.shape)
    kl_BT = low_var_kl(old_BT, masked_BT)
    scores = [float(kl_T[mask_T].mean()) for kl_T, mask_T in zip(kl_BT, mask_BT, strict=True)]
    low, high = min(scores), max(scores)
    normalized = [(score - low) / (high - low) for score in scores]
    target_max = target_min + (1.0 - target_min) / (sum(normalized) / len(normalized) + 1e-8)
    for row, (kl_T, mask_T) in enumerate(zip(kl_BT.tolist(), mask_BT.tolist(), strict=True)):
        valid = [place for place, is_valid in enumerate(mask_T) if is_valid]
        best = sorted(valid, key=lambda place, kl_T=kl_T: -kl_T[place])[: math.ceil(len(valid) * top_p)]
        factors_BT[row, best] = target_min + normalized[row] * (target_max - target_min)
    return factors_BT
