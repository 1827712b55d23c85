"""Files of a policy in a checkpoint: safetensors for weights, torch files for optimizers (`weights_only=True`).

The files do not depend on the number of ranks: tensors are gathered on the first rank one at a time to be written, and
on loading every rank reads the files and keeps its own shards.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fovea.errors import TrainError, broken_checkpoint
from fovea.models.trainable import VALUE_HEAD, policy_parameters
from fovea.train.torch.ranks import Ranks
from fovea.train.torch.sharding import copy_weights, full, sharded_as

TRAINABLE, VALUE = "trainable", "value"
"""File names, without suffix, of the policy's and of the value function's parameters and optimizer."""
COUNTS, REFERENCE = "policy.json", "reference.safetensors"


def save_tensors(
    folder: Path, name: str, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, ranks: Ranks
) -> None:
    """Write `name`.safetensors and `name`_optimizer.pt into an existing folder; all ranks must call."""
    weights = {key: _on_first(x, ranks).contiguous() for key, x in parameters.items()}
    state = optimizer.state_dict()
    state["state"] = {
        number: {key: _on_first(x, ranks) if isinstance(x, Tensor) else x for key, x in of_parameter.items()}
        for number, of_parameter in state["state"].items()
    }

    def write() -> None:
        with _full_disk_as_os_error():
            save_file(weights, folder / f"{name}.safetensors")
            # as a file of Python's, so that its error is known: torch's own writer names none
            with (folder / f"{name}_optimizer.pt").open("wb") as file:
                torch.save(state, file)

    ranks.run_on_first(write)


@contextmanager
def _full_disk_as_os_error() -> Iterator[None]:
    """OSError, as of other files, for the errors by which safetensors and torch say that a file cannot be written."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    except RuntimeError as error:
        if not isinstance(error.__context__, OSError):
            raise
        raise error.__context__ from error


def load_tensors(folder: Path, name: str, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Restore parameters and optimizer in place; TrainError when they belong to another model."""
    saved = _read(folder / f"{name}.safetensors")
    if {key: x.shape for key, x in saved.items()} != {key: x.shape for key, x in parameters.items()}:
        different = sorted(set(saved) ^ set(parameters)) or ["(same names, other sizes)"]
        raise TrainError(
            f"{folder} was saved by a model with other trainable parameters ({different[0]} ...); resume with the "
            "config.yaml of its run folder, or start a new run_dir"
        )
    copy_weights(saved, parameters)
    try:
        state = torch.load(folder / f"{name}_optimizer.pt", weights_only=True, map_location="cpu")
        _keep_settings(state, optimizer)
        # torch numbers parameters by its groups
        numbered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        optimizer.load_state_dict(_sharded(state, numbered))
    except (OSError, ValueError, KeyError, RuntimeError, UnpicklingError) as error:
        raise TrainError(f"{folder}: {broken_checkpoint(error)}") from error


def _keep_settings(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Put the optimizer's own settings in place of saved ones: those of the run may change on resume."""
    own = optimizer.state_dict()["param_groups"]
    if [group["params"] for group in state["param_groups"]] != [group["params"] for group in own]:
        raise ValueError("its parameters are in other groups")
    state["param_groups"] = own


def _on_first(tensor: Tensor, ranks: Ranks) -> Tensor:
    """The full tensor on the first rank, an empty one on the others."""
    whole = full(tensor.detach())
    if ranks.mesh is None:
        return whole
    # on the CPU, so that the device holds one full tensor at a time
    return whole.cpu() if ranks.is_first else whole.new_empty(0)


def _sharded(state: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """State of an optimizer with its moments sharded as their parameters; the scalar step counts stay whole."""
    state["state"] = {
        number: {
            key: sharded_as(parameters[number], x) if isinstance(x, Tensor) and x.dim() else x
            for key, x in of_parameter.items()
        }
        for number, of_parameter in state["state"].items()
    }
    return state


def save_counts(folder: Path, **counts: int) -> None:
    """Write named integers, such as the number of updates, into an existing folder."""
    (folder / COUNTS).write_text(json.dumps(counts))


def load_counts(folder: Path, *names: str) -> list[int]:
    """The integers that `save_counts` wrote under these names."""
    try:
        saved = json.loads((folder / COUNTS).read_text())
        return [int(saved[name]) for name in names]
    except (OSError, ValueError, KeyError) as error:
        raise TrainError(f"{folder}: {broken_checkpoint(error)}") from error


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise TrainError(f"{file}: {broken_checkpoint(error)}") from error


def save_reference(folder: Path, reference: nn.Module, ranks: Ranks) -> None:
    """Write the weights of a reference that a warm-up made, which therefore exist in no model folder."""
    weights = {name: _on_first(x, ranks).contiguous() for name, x in reference.named_parameters()}

    def write() -> None:
        with _full_disk_as_os_error():
            save_file(weights, folder / REFERENCE)

    ranks.run_on_first(write)


def load_reference(folder: Path, reference: nn.Module) -> bool:
    """Restore the reference in place and return True if the checkpoint holds one, else False."""
    if not (folder / REFERENCE).exists():
        return False
    copy_weights(_read(folder / REFERENCE), dict(reference.named_parameters()))
    return True


def is_policy_state(folder: Path) -> bool:
    """True if the folder holds a saved policy."""
    return (folder / f"{TRAINABLE}.safetensors").is_file()


@torch.no_grad()
def load_trained(checkpoint: Path, vlm: nn.Module) -> tuple[str, ...]:
    """Restore the trained parameters of a model in place, without optimizers and value function.

    Returns the names of the tensors and files that were left out. TrainError when the checkpoint belongs to another
    model.
    """
    saved = _read(checkpoint / f"{TRAINABLE}.safetensors")
    left_out = tuple(sorted(name for name in saved if name.startswith(VALUE_HEAD)))
    wanted = policy_parameters(vlm)
    shapes = {name: x.shape for name, x in saved.items() if name not in left_out}
    if shapes != {name: x.shape for name, x in wanted.items()}:
        first = next(iter(sorted(set(shapes) ^ set(wanted))), "(same names, other sizes)")
        raise TrainError(
            f"{checkpoint} was saved by a model with other trainable parameters ({first} ...); leave out the settings "
            "of model that are not those of its run"
        )
    copy_weights(saved, wanted)
    value = checkpoint / f"{VALUE}.safetensors"
    return (*left_out, *([value.name] if value.is_file() else []))
