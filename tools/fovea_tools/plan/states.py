"""Memory that a process holds through all phases: weights, the optimizer's states, and copies of models.

Model states are counted as in "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (Rajbhandari et
al., arXiv 1910.02054, section 3.1), with the layout of `train.torch.sharding` and `train.torch.optimizer`. On several
ranks weights, master weights, moments and gradients are sharded; the gradients of a unit are whole until its backward
pass has run (decision 054).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from fovea.config.run import Config
from fovea.train.torch.optimizer import BUCKET_BYTES
from fovea_tools.plan.activations import FLOAT, Bytes, Numerics
from fovea_tools.plan.model_sizes import ModelSizes

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ENGINE, REFERENCE, CRITIC, GATHERED = "engine's weights", "reference model", "critic", "gathered weights"
MOMENTS = 2


@dataclass(frozen=True, slots=True)
class States:
    """Bytes by part that are held in all phases, on the device and on the host."""

    on_device: Bytes
    on_host: Bytes
    """Bytes in host memory, for `train.backend.cpu_offload`."""

    def __add__(self, other: States) -> States:
        return States(self.on_device + other.on_device, self.on_host + other.on_host)


def held_states(config: Config, sizes: ModelSizes, ranks: int, numerics: Numerics) -> States:
    """Bytes that a training process holds in all phases, without its engine's weights and cache."""
    held = _trained(config, sizes, sizes.trainable, ranks, numerics)
    if has_own_critic(config):
        of_critic = _trained(config, sizes, critic_trainable(sizes), ranks, numerics)
        held += States(Counter({CRITIC: of_critic.on_device.total()}), Counter({CRITIC: of_critic.on_host.total()}))
    if config.copies_reference:
        held.on_device[REFERENCE] = _weights(sizes, shards_of(config, ranks), numerics.width, numerics.width)
    return held


def shards_of(config: Config, ranks: int) -> int:
    """Number of ranks that share one copy of the weights; all ranks together hold `train.backend.replicas` copies."""
    return max(1, ranks // config.train.backend.replicas)


def _trained(config: Config, sizes: ModelSizes, trainable: int, ranks: int, numerics: Numerics) -> States:
    """Bytes of the weights of a model under training, and of its optimizer's states."""
    if ranks == 1:
        # weights that are not float32 have float32 master weights
        masters = 0 if numerics.width == FLOAT else 1
        stay = Counter({PARAMETERS: sizes.parameters * numerics.width})
        move = Counter({OPTIMIZER: FLOAT * (MOMENTS + masters) * trainable})
    else:
        shards = shards_of(config, ranks)
        # shards of trained weights are float32: they are the master weights
        stay = Counter({PARAMETERS: _whole_tower(sizes) * numerics.width})
        move = Counter({PARAMETERS: _weights(sizes, shards, FLOAT, numerics.width)}) - stay
        move[OPTIMIZER] = FLOAT * MOMENTS * trainable // shards
    if not offloads(config, numerics):
        return States(stay + move, Counter())
    # shards have their gradients beside them; of a whole model, the host has two buckets of gradients at a time
    gradients = FLOAT * trainable // shards_of(config, ranks)
    return States(stay, move + Counter({GRADIENTS: gradients if ranks > 1 else min(gradients, 2 * BUCKET_BYTES)}))


def offloads(config: Config, numerics: Numerics) -> bool:
    """True if the optimizer runs in host memory."""
    return config.train.backend.cpu_offload and numerics.cuda


def gradient_bytes(config: Config, trainable: int, ranks: int, numerics: Numerics) -> int:
    """Bytes of gradients on the device between micro-batches: all on one rank, else a shard; 0 if offloaded."""
    if ranks == 1:
        return FLOAT * trainable
    return 0 if offloads(config, numerics) else FLOAT * trainable // shards_of(config, ranks)


def has_own_critic(config: Config) -> bool:
    """True if the value function is a separate model."""
    critic = config.algorithm.critic
    return critic is not None and critic.trunk == "separate"


def critic_trainable(sizes: ModelSizes) -> int:
    """Number of trained parameters of a separate critic: the policy's, without an untied head."""
    head = 0 if sizes.tied else sizes.vocabulary * sizes.width * sizes.head_trains
    return sizes.trainable - head


def gathered_bytes(sizes: ModelSizes, ranks: int, numerics: Numerics) -> int:
    """Peak bytes of FSDP2's gathered weights and of a layer's reduce-scatter buffer; 0 on one rank.

    FSDP2 holds the gathered root from its forward pass to the end of its backward pass, the layer that runs, the next
    layer, which is prefetched, and the buffer that one of them is copied from.
    """
    if ranks == 1:
        return 0
    (root,) = sizes.of("root")
    units = [unit for unit in sizes.units if unit is not root]
    largest = max((unit.total for unit in units), default=0)
    return (root.total + 3 * largest) * numerics.width + FLOAT * max((unit.trainable for unit in units), default=0)


def _weights(sizes: ModelSizes, shards: int, trained_width: int, width: int) -> int:
    """Bytes of this process's share of the weights; a frozen tower is whole on every rank."""
    whole = _whole_tower(sizes)
    trained = sizes.trainable
    frozen = sizes.parameters - trained - whole
    return whole * width + math.ceil((trained * trained_width + frozen * width) / shards)


def _whole_tower(sizes: ModelSizes) -> int:
    """Number of parameters of a frozen tower, which is not sharded; 0 for a trained tower."""
    return 0 if sizes.trains_vision else sum(unit.total for unit in sizes.of("vision"))
