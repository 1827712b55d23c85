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

WEIGHTS, OPTIMIZER, POLICY = "trainable.safetensors", "optimizer.pt", "policy.json"
REFERENCE = "reference.safetensors"


def save_state(folder: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Weights, optimizer and step count, in an existing folder."""
    save_file({name: x.detach().contiguous() for name, x in parameters.items()}, folder / WEIGHTS)
    torch.save(optimizer.state_dict(), folder / OPTIMIZER)
    (folder / POLICY).write_text(json.dumps({"steps": steps}))


def load_state(folder: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Fill parameters and optimizer in place; returns the steps taken. TrainError when the model is another one."""
    saved = _read(folder / WEIGHTS)
    if {name: x.shape for name, x in saved.items()} != {name: x.shape for name, x in parameters.items()}:
        different = sorted(set(saved) ^ set(parameters)) or ["(same names, other sizes)"]
        raise TrainError(
            f"{folder} was saved by a model with other trainable parameters ({different[0]} ...); resume with the "
            "config.yaml of its run folder, or start a new run_dir"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])
    try:
        optimizer.load_state_dict(torch.load(folder / OPTIMIZER, weights_only=True, map_location="cpu"))
        steps: int = json.loads((folder / POLICY).read_text())["steps"]
    except (OSError, ValueError, KeyError, RuntimeError, UnpicklingError) as error:
        raise TrainError(f"{folder}: {broken_checkpoint(error)}") from error
    return steps


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
