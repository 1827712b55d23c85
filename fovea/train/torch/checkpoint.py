"""Files of a policy in a checkpoint: a folder of shards for each set of tensors, and counts as JSON.

`trainable` and `value` hold the float32 weights of policy and value function, `trainable_optimizer` and
`value_optimizer` the moments of AdamW, `reference` the weights of a reference that a warm-up made.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from socket import gethostname

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from fovea.errors import TrainError, broken_checkpoint
from fovea.models.trainable import VALUE_HEAD, policy_parameters
from fovea.train.ranks import Ranks
from fovea.utils.host_waits import awaited
from fovea_gym.errors import named
from fovea_gym.utils.event_loop import in_background
from fovea_gym.utils.files import flush, os_errors

OFFSETS, OFFSET = "DCP_SHARDING_INFO", "saved_offsets"
"""Keys of DCP's entry in the header of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedShards:
    """One rank's shards of named tensors, copied to host memory."""

    shards: Mapping[str, Tensor]
    offsets: Mapping[str, Sequence[int]]
    """Offset of each shard's first element in the full tensor."""

    @staticmethod
    def of(tensors: Mapping[str, Tensor], ranks: Ranks) -> StagedShards:
        """Copy the tensors that this rank writes: its own shards, and on the first rank also unsharded tensors."""
        shards: dict[str, Tensor] = {}
        offsets: dict[str, Sequence[int]] = {}
        for name, tensor in tensors.items():
            if _is_written_here(tensor, ranks):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                shards[name] = _host_copy(local)
                offsets[name] = _offset(tensor)
        return StagedShards(shards=shards, offsets=offsets)

    def write(self, folder: Path, rank: int) -> None:
        """Write the file of this rank into a folder, which is created if necessary, and wait until it is on disk."""
        folder.mkdir(exist_ok=True)
        file = folder / f"rank-{rank:05}.safetensors"
        header = {OFFSETS: json.dumps({name: {OFFSET: list(offset)} for name, offset in self.offsets.items()})}
        with os_errors(file):
            # DCP's own writer would copy a whole file in memory twice while it holds the GIL
            save_file(dict(self.shards), file, metadata=header)
        flush(file)


def _is_written_here(tensor: Tensor, ranks: Ranks) -> bool:
    if not isinstance(tensor, DTensor):
        return ranks.is_first
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "a rank outside of the mesh of its weights"
    # only the first replica writes; a rank beyond the rows of a short tensor has no part of it
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
    """The tensors in a folder of shards, whose headers are read at once; TrainError if they cannot be read."""

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
            """Shapes of the full tensors, by name."""

    def copy_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Read tensors by name; for a sharded tensor, only the shard that this rank holds."""
        # each rank plans for itself from all headers: DCP's own `load` would send pickles between ranks
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        with self._errors_named(), torch.no_grad():
            planner.set_up_planner({name: x.detach() for name, x in tensors.items()}, self._metadata)
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            self._reader.read_data(planner.create_local_plan(), planner)

    def _errors_named(self) -> AbstractContextManager[None]:
        return named(lambda error: TrainError(f"{self._folder}: {broken_checkpoint(error)}"))


def _whole_shapes(metadata: Metadata) -> Iterator[tuple[str, torch.Size]]:
    """Names and shapes of all tensors; ValueError if a tensor has missing shards."""
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), "safetensors hold only tensors"
        if sum(prod(chunk.sizes) for chunk in entry.chunks) != prod(entry.size):
            raise ValueError(f"shards of {name} are missing")
        yield name, entry.size


TRAINABLE, VALUE, REFERENCE = "trainable", "value", "reference"
"""Folders of the policy's and the value function's parameters, and of the reference."""
COUNTS = "policy.json"


def optimizer_folder(name: str) -> str:
    """The folder of the moments for the parameters in folder `name`."""
    return f"{name}_optimizer"


def optimizer_tensors(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors that an optimizer keeps, as `exp_avg/NAME`; none for parameters that have had no gradient yet."""
    return {
        f"{kind}/{name}": tensor
        for name, parameter in parameters.items()
        for kind, tensor in optimizer.state.get(parameter, {}).items()
    }


def load_weights(folder: Path, name: str, parameters: Mapping[str, Tensor]) -> None:
    """Restore parameters in place from folder `name`; TrainError when they belong to another model."""
    saved = SavedShards(folder / name)
    fix = "resume with the config.yaml of its run folder, or start a new run_dir"
    _check_same(folder, saved.shapes, parameters, fix)
    saved.copy_into(parameters)


def load_optimizer(folder: Path, name: str, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Restore the moments of these parameters; rate, decay and other settings stay those of the optimizer."""
    saved = SavedShards(folder / optimizer_folder(name))
    tensors: dict[str, Tensor] = {}
    optimizer.state.clear()
    for key, shape in saved.shapes.items():
        kind, _, of_parameter = key.partition("/")
        parameter = parameters.get(of_parameter)
        # moments are sharded like their parameter; a step count is a whole tensor on every rank
        if parameter is None or shape not in (parameter.shape, torch.Size()):
            raise TrainError(f"{folder}: {broken_checkpoint(ValueError(f'{key} is of another model'))}")
        is_moment = shape == parameter.shape
        tensors[key] = torch.zeros_like(parameter) if is_moment else torch.zeros((), device=parameter.device)
        optimizer.state[parameter][kind] = tensors[key]
    saved.copy_into(tensors)


def _check_same(folder: Path, saved: Mapping[str, torch.Size], parameters: Mapping[str, Tensor], fix: str) -> None:
    """TrainError if names or shapes of saved tensors differ from those of the parameters."""
    if saved != {name: x.shape for name, x in parameters.items()}:
        different = sorted(set(saved) ^ set(parameters)) or ["(same names, other sizes)"]
        raise TrainError(f"{folder} was saved by a model with other trainable parameters ({different[0]} ...); {fix}")


def save_counts(folder: Path, counts: Mapping[str, int]) -> None:
    """Write named integers, such as the number of updates, into an existing folder."""
    (folder / COUNTS).write_text(json.dumps(dict(counts)))


def load_counts(folder: Path, *names: str) -> list[int]:
    """The integers that `save_counts` wrote under these names."""
    try:
        saved = json.loads((folder / COUNTS).read_text())
        return [int(saved[name]) for name in names]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise TrainError(f"{folder}: {broken_checkpoint(error)}") from error


def load_reference(folder: Path, reference: nn.Module) -> bool:
    """Restore the reference in place and return True if the checkpoint holds one, else False."""
    if not (folder / REFERENCE).exists():
        return False
    load_weights(folder, REFERENCE, dict(reference.named_parameters()))
    return True


def load_trained(checkpoint: Path, vlm: nn.Module) -> tuple[str, ...]:
    """Restore the trained parameters of a model in place, without optimizers and value function.

    Returns the names of the tensors and folders that were left out. TrainError when the checkpoint belongs to another
    model.
    """
    saved = SavedShards(checkpoint / TRAINABLE)
    left_out = tuple(sorted(name for name in saved.shapes if name.startswith(VALUE_HEAD)))
    wanted = policy_parameters(vlm)
    shapes = {name: shape for name, shape in saved.shapes.items() if name not in left_out}
    _check_same(checkpoint, shapes, wanted, "remove the model settings that differ from those of its run")
    saved.copy_into(wanted)
    return (*left_out, *([VALUE] if (checkpoint / VALUE).is_dir() else []))


class Saving:
    """Writes a rank's part of a policy's checkpoints."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._writing: Future[None] | None = None

    def begin(self, folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], counts: Mapping[str, int]) -> None:
        """Copy tensors to host memory, and begin to write this rank's shards of each set to its folder in `folder`.

        TrainError if this rank cannot see the folder.
        """
        assert self._writing is None, "the previous checkpoint is not finished"
        self._ranks.run_on_each(partial(_check_seen, folder))
        staged = {name: StagedShards.of(each, self._ranks) for name, each in tensors.items()}

        def write() -> None:
            for name, shards in staged.items():
                shards.write(folder / name, self._ranks.rank)
            if self._ranks.is_first:
                save_counts(folder, counts)

        self._writing = in_background(write, "checkpoint")

    def finish(self) -> None:
        """Wait until everything is on disk; raises an error of the write."""
        assert self._writing is not None, "no checkpoint was begun"
        writing, self._writing = self._writing, None
        writing.result()


def _check_seen(folder: Path) -> None:
    if not folder.is_dir():
        raise TrainError(
            f"{folder} does not exist on {socket.gethostname()}, which cannot write its part of the checkpoint; put "
            "run_dir on storage that all machines see under one path"
        )
