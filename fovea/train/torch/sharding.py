"""Sharding of weights, gradients and optimizer states over ranks by torch's FSDP2, which no other module calls.

The weights of a decoder layer or vision block are all-gathered, in the model's dtype, while it runs. Otherwise each
rank holds a shard, which the optimizer updates; shards of trained weights are float32. In a single process nothing is
sharded, and weights are plain tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fovea.models.heads import ValueHead
from fovea.models.modules import language_model, vision_modules
from fovea.models.policy_network import PolicyNetwork
from fovea.train.ranks import Ranks


def shard(model: nn.Module, ranks: Ranks, *, cpu_offload: bool = False) -> None:
    """Shard a PolicyNetwork, or a model with one inside, in place; with `cpu_offload` into host memory.

    Must be called before an optimizer is made for the parameters; shards of trained parameters are float32.
    """
    if ranks.mesh is None:
        return
    vlm = next(module for module in model.modules() if isinstance(module, PolicyNetwork))
    vision = vision_modules(vlm.network)
    # a frozen tower is not sharded: ranks encode the images that their caches lack at different times, and a sharded
    # module would wait for the other ranks
    whole = set() if vlm.trains_vision else {parameter for module in vision for parameter in module.parameters()}
    heads = [module for module in model.modules() if isinstance(module, ValueHead)]
    lists = [each for module in vision for each in module.modules() if isinstance(each, nn.ModuleList)]
    blocks = [] if whole else [block for each in lists for block in each]
    options: dict[str, Any] = {"mesh": ranks.weights_mesh}
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=ranks.mesh.device_type == "cuda")
    # a value head is a separate unit: it computes in float32 on a bfloat16 trunk
    for head in heads:
        fully_shard(head, **options, mp_policy=_precision(torch.float32))
    options["mp_policy"] = _precision(vlm.dtype)
    for module in (*language_model(vlm.network).layers, *blocks):
        _make_masters(module)
        fully_shard(module, **options)
    _make_masters(model)
    # the root is resharded after its forward pass too, so that all parameters are DTensors between passes
    fully_shard(model, **options, ignored_params=whole, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # losses are divided by counts of the whole batch: gradients are summed, not averaged
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def _precision(compute: torch.dtype) -> MixedPrecisionPolicy:
    """Run passes in this dtype, and sum gradients over micro-batches and ranks in float32."""
    # inputs are not cast: they keep the dtype that they have in one process, such as float32 for rotary positions
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _make_masters(module: nn.Module) -> None:
    """Make the trained weights of a module float32: their shards are then the optimizer's master weights."""
    # module by module, so that there is never a float32 copy of the whole model on one device
    for parameter in module.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.float()


def shards_tower(vlm: PolicyNetwork) -> bool:
    """True if the vision tower's weights are sharded, so that all ranks must run it together."""
    return isinstance(vlm, FSDPModule) and vlm.trains_vision


def sum_over_replicas(model: nn.Module, *, now: bool) -> None:
    """Choose whether the next backward pass sums gradients over the replicas of the weights, if there are several.

    Every backward pass reduce-scatters gradients over the ranks of a replica (decision 054); the shards need to be
    summed over replicas only in the backward pass of an optimizer step's last micro-batch.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(now)


def full(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Gather the full tensor of a shard, in `dtype` if given, on the ranks' device; all ranks must call it.

    Any other tensor is returned unchanged.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    # converted before it is sent; shards in host memory are copied to the device first
    shards: Any = tensor.to(device=tensor.device_mesh.device_type, dtype=dtype)
    gathered: Tensor = shards.full_tensor()
    return gathered


def sharded_as(like: Tensor, tensor: Tensor) -> Tensor:
    """This rank's shard of a full tensor, with the placement of `like`; the tensor itself if `like` is not sharded."""
    if not isinstance(like, DTensor):
        return tensor
    # src_data_rank=None: every rank has the full tensor, so that none has to be broadcast
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def copy_weights(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Copy `source` into the tensors of `target` by name; either may be sharded."""
    for name, tensor in target.items():
        tensor.copy_(sharded_as(tensor, full(source[name])))
