"""Supervised fine-tuning by torch: the gradients of a step, and an optimizer on float32 master weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fovea.config.sections import Warmup
from fovea.models.policy_network import PolicyNetwork
from fovea.models.trainable import trainable_parameters
from fovea.train.adamw import AdamWSettings
from fovea.train.base import SftExample
from fovea.train.ranks import ALONE, Ranks
from fovea.train.sft import SupervisedTrainer, cross_entropy, row_of_share
from fovea.train.torch.optimizer import Optimizer
from fovea.train.torch.passes import dropout_seed
from fovea.train.torch.sharding import shards_tower
from fovea.utils.host_waits import awaited


def supervised_trainer(
    vlm: PolicyNetwork, settings: Warmup, ranks: Ranks = ALONE, *, cpu_offload: bool = False
) -> SupervisedTrainer:
    """A trainer of the network; `cpu_offload` keeps master weights and moments in the host's memory."""

    def backward(pairs: Sequence[SftExample], step: int) -> float:
        vlm.train()
        # a rank without images must enter the same sharded modules as the others
        images = [image for pair in pairs for image in pair.prompt.images] if shards_tower(vlm) else []
        row = row_of_share(vlm, pairs, ranks, images)
        with dropout_seed(step, ranks, vlm.device):
            scores = vlm(row, temperature=1.0, chunk_tokens=max(row.num_actions, 1))
        loss = cross_entropy(scores.logprobs_A, pairs)
        # text has no graph where only the vision has adapters: on all ranks, or on none
        if loss.requires_grad:
            torch.autograd.backward(loss)
        vlm.eval()
        return float(awaited(loss.detach()))

    optimizer = Optimizer(trainable_parameters(vlm), AdamWSettings.of_warmup(settings), on_host=cpu_offload)
    return SupervisedTrainer(optimizer, backward, ranks=ranks, banned_ids=vlm.banned_ids)
