"""The network of a model on several processes, read from disk by the first one only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from fovea.config.model import Model
from fovea.models.load import empty_network, load_network
from fovea.train.ranks import Ranks


def load_on_ranks(settings: Model, device: torch.device, ranks: Ranks) -> PreTrainedModel:
    """Load the network of `model.path` on every rank, all of which must make this call.

    The first rank has it on the CPU, as `load_network` reads it; the others have copies on `device`. An error of one of
    them is raised on all.
    """
    if ranks.mesh is None:
        return load_network(settings)
    made: list[PreTrainedModel] = []
    ranks.run_on_each(lambda: made.append((load_network if ranks.is_first else empty_network)(settings)))
    if ranks.is_first:
        _send(made[0], device, ranks)
    else:
        _fill(made[0], device, ranks)
    return made[0]


def _send(network: PreTrainedModel, device: torch.device, ranks: Ranks) -> None:
    """Broadcast names, shapes and types of all tensors, then one after the other."""
    tensors = {name: tensor.detach() for name, tensor in _tensors(network)}
    ranks.gather([[name, list(x.shape), str(x.dtype).removeprefix("torch.")] for name, x in tensors.items()])
    for tensor in tensors.values():
        _broadcast(tensor.to(device).contiguous(), ranks)


def _fill(network: PreTrainedModel, device: torch.device, ranks: Ranks) -> None:
    """Replace the tensors of an empty network by those of the first rank."""
    for name, shape, dtype in ranks.gather(None)[0]:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        _broadcast(tensor, ranks)
        path, _, leaf = name.rpartition(".")
        module: Any = network.get_submodule(path)
        setattr(module, leaf, nn.Parameter(tensor) if isinstance(getattr(module, leaf), nn.Parameter) else tensor)
    network.tie_weights()


def _tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters, tied ones once, and all buffers, also those that no file holds, such as rotary frequencies."""
    return chain(network.named_parameters(), network.named_buffers())


def _broadcast(tensor: Tensor, ranks: Ranks) -> None:
    assert ranks.mesh is not None, "a single rank has nobody to send to"
    dist.broadcast(tensor, group_src=0, group=ranks.mesh.get_group())
