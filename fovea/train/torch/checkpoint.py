"""Files of a policy in a checkpoint: a folder of shards for each set of tensors, and counts as JSON.

`trainable` and `value` have the float32 weights of policy and value function, `trainable_optimizer` and
`value_optimizer` the moments of AdamW, `reference` the weights of a reference that a warm-up made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fovea.errors import TrainError, broken_checkpoint
from fovea.models.trainable import VALUE_HEAD, policy_parameters
from fovea.train.torch.shards import SavedShards

TRAINABLE, VALUE, REFERENCE = "trainable", "value", "reference"
"""Folders of the policy's and the value function's parameters, and of the reference."""
COUNTS = "policy.json"


def optimizer_folder(name: str) -> str:
    """The folder of the moments for the parameters in folder `name`."""
    return f"{name}_optimizer"


def optimizer_tensors(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors that an optimizer keeps, as `exp_avg/NAME`; none for parameters that had no gradient yet."""
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
        # moments are placed as their parameter; of a step count every rank has the whole
        if parameter is None or shape not in (parameter.shape, torch.Size()):
            raise TrainError(f"{folder}: {broken_checkpoint(ValueError(f'{key} is of another model'))}")
        is_moment = shape == parameter.shape
        tensors[key] = torch.zeros_like(parameter) if is_moment else torch.zeros((), device=parameter.device)
        optimizer.state[parameter][kind] = tensors[key]
    saved.copy_into(tensors)


def _check_same(folder: Path, saved: Mapping[str, torch.Size], parameters: Mapping[str, Tensor], fix: str) -> None:
    """TrainError where names or shapes of saved tensors are not those of the parameters."""
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
    _check_same(checkpoint, shapes, wanted, "leave out the settings of model that are not those of its run")
    saved.copy_into(wanted)
    return (*left_out, *([VALUE] if (checkpoint / VALUE).is_dir() else []))
