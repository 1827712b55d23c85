"""Sharding of weights, gradients and optimizer states over ranks by torch's FSDP2, which no other module calls.

The weights of a decoder layer or vision block are all-gathered while it runs and FSDP2 shards otherwise. In a single
process nothing is sharded, and weights are plain tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fovea.errors import TrainError
from fovea.models.modules import language_model, vision_modules
from fovea.models.policy_network import PolicyNetwork
from fovea.models.value_head import ValueHead
from fovea.models.vlm import VLM
from fovea.train.torch.ranks import Ranks


def shard(model: nn.Module, ranks: Ranks) -> None:
    """Shard the weights of a VLM, or of a model with a VLM inside, in place.

    Must be called before an optimizer is made of the parameters. TrainError for a model without a fast path.
    """
    if ranks.mesh is None:
        return
    vlm = next((module for module in model.modules() if isinstance(module, VLM)), None)
    if vlm is None:
        raise TrainError(
            "model.fast_path=off, or a family without a fast path, trains in one process only, but there are "
            f"{ranks.size}; set model.fast_path=auto, or start one process"
        )
    vision = vision_modules(vlm.network)
    # a frozen tower is not sharded: each rank encodes images that its cache lacks, at times of its own, and a sharded
    # module would wait for the other ranks
    whole = set() if vlm.trains_vision else {parameter for module in vision for parameter in module.parameters()}
    heads = [module for module in model.modules() if isinstance(module, ValueHead)]
    lists = [each for module in vision for each in module.modules() if isinstance(each, nn.ModuleList)]
    blocks = [] if whole else [block for each in lists for block in each]
    # sums over micro-batches and ranks are float32: sums of 16-bit gradients would lose small ones. FSDP2 rounds the
    # result to the type of the weights, once.
    options: dict[str, Any] = {"mesh": ranks.mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    # a value head is a unit by itself: it is float32 beside a bfloat16 trunk, and a reduce-scatter has one type
    for module in (*language_model(vlm.network).layers, *blocks, *heads):
        fully_shard(module, **options)
    # the root is resharded after its forward pass too, so that all parameters are DTensors between passes
    fully_shard(model, **options, ignored_params=whole, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # losses are divided by counts of the whole batch: gradients are summed, not averaged
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def shards_tower(vlm: PolicyNetwork) -> bool:
    """True if the vision tower's weights are sharded, so that all ranks must run it together."""
    return isinstance(vlm, FSDPModule) and vlm.trains_vision


def sync_gradients(model: nn.Module, *, now: bool) -> None:
    """Choose whether the next backward pass reduce-scatters gradients over ranks; no-op for an unsharded model.

    Only that of the last micro-batch of an optimizer step needs to.
    """
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(now)
        model.set_requires_gradient_sync(now)


def full(tensor: Tensor) -> Tensor:
    """The full tensor of a shard, by an all-gather that all ranks must join; any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_as(like: Tensor, tensor: Tensor) -> Tensor:
    """This rank's shard of a full tensor, placed as `like`; the tensor itself if `like` is not sharded."""
    if not isinstance(like, DTensor):
        return tensor
    # src_data_rank=None: every rank has the full tensor, so that none has to be broadcast
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def copy_weights(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Copy `source` into the tensors of `target` by name; either may be sharded."""
    for name, tensor in target.items():
        tensor.copy_(sharded_as(tensor, full(source[name])))
