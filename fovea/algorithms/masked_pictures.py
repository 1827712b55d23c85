"""Terms of a picture, clean and masked: PAPO's loss and VPPO's weights.

A token's dependence on the picture is KL(clean || masked) of its distributions, by the k3 estimate of `kl.k3`.

Axes: `A` action tokens, `B` completions, `T` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.algorithms.kl import k3

SAME_DEPENDENCE = 1e-6


def masked_pictures_loss(
    logprobs_A: Tensor,
    masked_logprobs_A: Tensor,
    *,
    coef: float,
    entropy_penalty: float,
    masked_entropy_penalty: float,
) -> Tensor:
    """PAPO's terms of the loss, -coef k3(lp, lp_masked) - eta_1 lp - eta_2 lp_masked; VPPO's is that with eta_1 only.

    k3 = e^x - x - 1 with x = lp_masked - lp, at most 10: the KL is raised, and -lp and -lp_masked, whose means estimate
    the two entropies, are lowered (the double entropy loss). Wang et al., PAPO, arXiv 2507.06448; MikeWangWZHL/PAPO,
    verl/workers/actor/dp_actor.py, where lp_masked has no gradient. Aggregated as the policy loss is.
    """
    entropies_A = -entropy_penalty * logprobs_A - masked_entropy_penalty * masked_logprobs_A
    return entropies_A - coef * k3(logprobs_A, masked_logprobs_A)


@dataclass(frozen=True, slots=True, kw_only=True)
class VppoWeights:
    """Factors of the advantages."""

    kept_BT: Tensor
    """True at the tokens whose loss is kept."""
    scales_B: Tensor
    """Factor of each completion's advantages."""


def vppo_weights(dependence_BT: Tensor, mask_BT: Tensor, *, token_share: float, min_scale: float) -> VppoWeights:
    """VPPO's choice of tokens and scale of completions, by their dependence on the picture.

        kept    the ceil(token_share * n) tokens of a completion of n that depend most
        d_i     mean dependence of completion i, s_i = (d_i - min d) / (max d - min d)
        scale   min_scale + s_i (max_scale - min_scale), max_scale = min_scale + (1 - min_scale) / mean s

    so that the mean scale is 1; all are 1 where the d_i are within 1e-6. Huang et al., VPPO, arXiv 2510.09285;
    huaixuheqing/VPPO-RL, verl/workers/actor/dp_actor.py, where the mean is over a micro-batch and the range over a
    mini-batch of one GPU: here both are over the step.
    """
    lengths_B = mask_BT.sum(1)
    by_rank_BT = dependence_BT.masked_fill(~mask_BT, -torch.inf).argsort(dim=1, descending=True, stable=True)
    ranks_BT = by_rank_BT.argsort(dim=1)
    kept_BT = mask_BT & (ranks_BT < (lengths_B * token_share).ceil()[:, None])
    means_B = (dependence_BT * mask_BT).sum(1) / lengths_B.clamp(min=1)
    given_B = means_B[lengths_B > 0]
    scales_B = torch.ones_like(means_B)
    if len(given_B) > 1 and given_B.max() - given_B.min() > SAME_DEPENDENCE:
        shares_B = (given_B - given_B.min()) / (given_B.max() - given_B.min())
        max_scale = min_scale + (1 - min_scale) / shares_B.mean()
        scales_B[lengths_B > 0] = min_scale + shares_B * (max_scale - min_scale)
    return VppoWeights(kept_BT=kept_BT, scales_B=scales_B)
