"""Files of shards: every rank writes the shards that it holds, and reads those that it needs, on any number of ranks.

The format is that of torch.distributed.checkpoint's `HuggingFaceStorageWriter` (torch 2.13): safetensors with the
offset of every shard in the header. Its reader and planner reshard on loading. No part of it is a pickle, as DCP's
`.metadata` is, and no message passes between ranks (decision 021).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from socket import gethostname

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from fovea.errors import TrainError, broken_checkpoint, named
from fovea.train.ranks import Ranks
from fovea.utils.files import flush, os_errors
from fovea.utils.host_waits import awaited

OFFSETS, OFFSET = "DCP_SHARDING_INFO", "saved_offsets"
"""Keys of DCP's entry in the header of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedShards:
    """One rank's shards of named tensors, copied to host memory."""

    shards: Mapping[str, Tensor]
    offsets: Mapping[str, Sequence[int]]
    """Place of each shard's first element in its whole tensor."""

    @staticmethod
    def of(tensors: Mapping[str, Tensor], ranks: Ranks) -> StagedShards:
        """Copy what this rank writes of the tensors: its own shards, and on the first rank tensors without shards."""
        shards: dict[str, Tensor] = {}
        offsets: dict[str, Sequence[int]] = {}
        for name, tensor in tensors.items():
            if _is_written_here(tensor, ranks):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                shards[name] = _host_copy(local)
                offsets[name] = _offset(tensor)
        return StagedShards(shards=shards, offsets=offsets)

    def write(self, folder: Path, rank: int) -> None:
        """Write the file of this rank into a folder, which is made if need be, and wait until it is on disk."""
        folder.mkdir(exist_ok=True)
        file = folder / f"rank-{rank:05}.safetensors"
        header = {OFFSETS: json.dumps({name: {OFFSET: list(offset)} for name, offset in self.offsets.items()})}
        with os_errors(file):
            # not DCP's own writer: it copies all of a file in memory, twice, while no other thread of Python runs
            save_file(dict(self.shards), file, metadata=header)
        flush(file)


def _is_written_here(tensor: Tensor, ranks: Ranks) -> bool:
    if not isinstance(tensor, DTensor):
        return ranks.is_first
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "a rank outside of the mesh of its weights"
    # of replicas, the first one; a rank beyond the rows of a short tensor has nothing of it
    copies = (at for at, placement in zip(place, tensor.placements, strict=True) if isinstance(placement, Replicate))
    return not any(copies) and tensor.to_local().numel() > 0


def _host_copy(tensor: Tensor) -> Tensor:
    return awaited(tensor.detach()).to("cpu", copy=True, memory_format=torch.contiguous_format)


def _offset(tensor: Tensor) -> Sequence[int]:
    if not isinstance(tensor, DTensor):
        return [0] * tensor.dim()
    (chunk,) = tensor.__create_chunk_list__()  # DCP's protocol of sharded tensors
    return list(chunk.offsets)


class SavedShards:
    """The tensors in a folder of shards, of which the headers have been read; TrainError where they cannot be."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = HuggingFaceStorageReader(str(folder))
        checkpoint = folder.parent
        if not checkpoint.is_dir():
            raise TrainError(
                f"{checkpoint}: no such folder on {gethostname()}; put run_dir where all machines of the run see the "
                "same files"
            )
        with self._errors_named():
            if not any(folder.glob("*.safetensors")):
                raise ValueError(f"{folder.name} has no shards")
            self._metadata = self._reader.read_metadata()
            self.shapes = dict(_whole_shapes(self._metadata))
            """Shapes of the whole tensors, by name."""

    def copy_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Read tensors by name, of a sharded one the shard that this rank holds."""
        # planned by each rank alone, which reads all headers: DCP's own `load` would send pickles between ranks
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        with self._errors_named(), torch.no_grad():
            planner.set_up_planner({name: x.detach() for name, x in tensors.items()}, self._metadata)
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            self._reader.read_data(planner.create_local_plan(), planner)

    def _errors_named(self) -> AbstractContextManager[None]:
        return named(lambda error: TrainError(f"{self._folder}: {broken_checkpoint(error)}"))


def _whole_shapes(metadata: Metadata) -> Iterator[tuple[str, torch.Size]]:
    """Names and shapes of all tensors; ValueError for one whose shards do not fill it."""
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), "safetensors hold tensors alone"
        if sum(prod(chunk.sizes) for chunk in entry.chunks) != prod(entry.size):
            raise ValueError(f"shards of {name} are missing")
        yield name, entry.size
