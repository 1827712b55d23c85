"""The process groups of Megatron, and the rank of this process in each of them.

Ranks are numbered tensor axis first, then data, then pipeline, as Megatron-core does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed.device_mesh import DeviceMesh

from fovea.config.backends import MegatronBackend
from fovea.config.run import Config
from fovea.train.model_division import check_processes
from fovea.train.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelRank:
    """Ranks and groups of this process among the processes of the policy."""

    data: Ranks
    """Rank and size of the data axis, to whose shares micro-batches are assigned; its mesh is always None."""
    results: Ranks
    """The processes that hold this slice of the tensors, one for each share and pipeline stage. Results of the last
    stages, and decisions that all must share, are merged over them."""
    everyone: Ranks
    shares: tuple[int, ...]
    """The data share of each process, by its rank among all processes."""

    @staticmethod
    def setup(config: Config, device: torch.device) -> ParallelRank:
        """Create the groups of all processes of torch.distributed, or of this one only; all processes must call it.

        ConfigError if the settings cannot divide the processes evenly.
        """
        settings = config.train.backend
        assert isinstance(settings, MegatronBackend)
        if not dist.is_initialized():
            # Megatron's collectives need a group, even for a single process
            backend = "nccl" if device.type == "cuda" else "gloo"
            store = dist.HashStore()  # type: ignore[attr-defined]  # public, though torch does not list it
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        size, tensor, pipeline = dist.get_world_size(), settings.tensor_parallel_size, settings.pipeline_parallel_size
        check_processes(settings, size)
        experts = settings.expert_parallel_size
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor,
                pipeline,
                expert_model_parallel_size=experts,
                # experts that are divided among processes are not split further
                expert_tensor_parallel_size=1 if experts > 1 else None,
            )
        model_parallel_cuda_manual_seed(config.seed)
        num_shares = parallel_state.get_data_parallel_world_size()
        return ParallelRank(
            data=Ranks(rank=parallel_state.get_data_parallel_rank(), size=num_shares),
            results=_ranks([list(range(first, size, tensor)) for first in range(tensor)], device),
            everyone=_ranks([list(range(size))], device),
            shares=tuple(rank // tensor % num_shares for rank in range(size)),
        )


def _ranks(groups: list[list[int]], device: torch.device) -> Ranks:
    """This process's rank in the one of these disjoint groups of equal size that contains it."""
    if len(groups[0]) == 1:
        return Ranks()
    mine, _ = dist.new_subgroups_by_enumeration(groups)
    return Ranks(rank=mine.rank(), size=mine.size(), mesh=DeviceMesh.from_group(mine, device.type))
