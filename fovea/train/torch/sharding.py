"""Weights, gradients and optimizer states over ranks, by torch's FSDP2: everything here that knows of it.

A decoder layer or a vision block is whole on a rank while it runs and a shard of it otherwise. A process by itself
shards nothing: its weights are plain tensors.
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
    """Shard the weights of a VLM, or of a model on top of one, in place, before an optimizer takes hold of them."""
    if ranks.mesh is None:
        return
    vlm = next((module for module in model.modules() if isinstance(module, VLM)), None)
    if vlm is None:
        raise TrainError(
            "model.fast_path=off, or a family without a fast path, trains in one process only, but there are "
            f"{ranks.size}; set model.fast_path=auto, or start one process"
        )
    vision = vision_modules(vlm.network)
    # a frozen tower is whole on every rank: each encodes the images of its own rows, whenever it meets a new one
    whole = set() if vlm.trains_vision else {parameter for module in vision for parameter in module.parameters()}
    heads = [module for module in model.modules() if isinstance(module, ValueHead)]
    lists = [each for module in vision for each in module.modules() if isinstance(each, nn.ModuleList)]
    blocks = [] if whole else [block for each in lists for block in each]
    # 16-bit gradients are summed in float32
    options: dict[str, Any] = {"mesh": ranks.mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    # a value head is float32 beside a bfloat16 trunk: one reduction has gradients of one type
    for module in (*language_model(vlm.network).layers, *blocks, *heads):
        fully_shard(module, **options)
    # the root too is a shard between passes, so that whoever reads a parameter finds the same kind of tensor
    fully_shard(model, **options, ignored_params=whole, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # losses are divided by counts of the whole batch: gradients are summed, not averaged
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def shards_tower(vlm: PolicyNetwork) -> bool:
    """Whether the ranks have to enter the vision tower together."""
    return isinstance(vlm, FSDPModule) and vlm.trains_vision


def sync_gradients(model: nn.Module, *, now: bool) -> None:
    """Whether the next backward pass adds up the ranks' gradients: that of the last micro-batch of a step does."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(now)
        model.set_requires_gradient_sync(now)


def full(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, for which all ranks must ask; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_as(like: Tensor, tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor that every rank has in full; the tensor itself where `like` is no shard."""
    if not isinstance(like, DTensor):
        return tensor
    # on the device of the shards, and from what this rank has: nothing is sent
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def copy_weights(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Fill the tensors of `target` with those of the same names, however either is sharded."""
    for name, tensor in target.items():
        tensor.copy_(sharded_as(tensor, full(source[name])))
