"""What a policy writes into a checkpoint, and how it is read back: safetensors, and torch files read as data only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fovea.errors import TrainError, broken_checkpoint

POLICY, REFERENCE = "policy.json", "reference.safetensors"


def save_tensors(folder: Path, name: str, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """`name`.safetensors and `name`_optimizer.pt, in an existing folder."""
    save_file({key: x.detach().contiguous() for key, x in parameters.items()}, folder / f"{name}.safetensors")
    torch.save(optimizer.state_dict(), folder / f"{name}_optimizer.pt")


def load_tensors(folder: Path, name: str, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Fill parameters and optimizer in place. TrainError when the model is another one."""
    saved = _read(folder / f"{name}.safetensors")
    if {key: x.shape for key, x in saved.items()} != {key: x.shape for key, x in parameters.items()}:
        different = sorted(set(saved) ^ set(parameters)) or ["(same names, other sizes)"]
        raise TrainError(
            f"{folder} was saved by a model with other trainable parameters ({different[0]} ...); resume with the "
            "config.yaml of its run folder, or start a new run_dir"
        )
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(saved[key])
    try:
        optimizer.load_state_dict(torch.load(folder / f"{name}_optimizer.pt", weights_only=True, map_location="cpu"))
    except (OSError, ValueError, KeyError, RuntimeError, UnpicklingError) as error:
        raise TrainError(f"{folder}: {broken_checkpoint(error)}") from error


def save_counts(folder: Path, **counts: int) -> None:
    (folder / POLICY).write_text(json.dumps(counts))


def load_counts(folder: Path, *names: str) -> list[int]:
    """What `save_counts` wrote under these names."""
    try:
        saved = json.loads((folder / POLICY).read_text())
        return [int(saved[name]) for name in names]
    except (OSError, ValueError, KeyError) as error:
        raise TrainError(f"{folder}: {broken_checkpoint(error)}") from error


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise TrainError(f"{file}: {broken_checkpoint(error)}") from error


def save_reference(folder: Path, reference: nn.Module) -> None:
    """A reference that no model folder holds: what a warm-up made."""
    save_file({name: x.detach().contiguous() for name, x in reference.named_parameters()}, folder / REFERENCE)


@torch.no_grad()
def load_reference(folder: Path, reference: nn.Module) -> bool:
    """Fill the reference if the checkpoint holds one; whether it did."""
    if not (folder / REFERENCE).exists():
        return False
    saved = _read(folder / REFERENCE)
    for name, parameter in reference.named_parameters():
        parameter.copy_(saved[name])
    return True
