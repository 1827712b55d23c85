"""Trials of kernels before a run uses them: their outputs and gradients are compared with those of plain functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fovea.errors import is_out_of_memory
from fovea_gym.errors import first_line

Tensors = Mapping[str, Tensor]


def why_refused(trial: Callable[[], str | None]) -> str | None:
    """The finding of a trial, or the first line of the error that it raised; None if the trial finds nothing wrong.

    There is no published table of the types, widths and devices that a kernel supports. Out-of-memory errors propagate,
    since they say nothing about the kernel.
    """
    try:
        return trial()
    except Exception as error:  # a kernel, its compiler, its package and the C compiler may raise anything
        if is_out_of_memory(error):
            raise
        line = first_line(error)
        # errors of Triton's compiler begin with a place in the kernel's source and end with the reason
        return f"{line} {str(error).splitlines()[-1].strip()}" if line.endswith(":") else line


@torch.inference_mode(mode=False)  # the first caller may be in inference mode, where nothing has gradients
@torch.enable_grad()
def values_and_gradients(function: Callable[..., Tensors], inputs: Tensors) -> dict[str, Tensor]:
    """Named outputs of a function, and the gradients of its inputs from one random gradient of each output."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    # a kernel may overwrite its inputs, which autograd forbids for leaves
    found = function(**{name: x.clone() for name, x in leaves.items()})
    gradients = [random_tensor(*x.shape, like=x, seed=seed) for seed, x in enumerate(found.values())]
    # copied now, since a backward pass may overwrite the outputs
    values = {name: x.detach().clone() for name, x in found.items()}
    of_inputs = torch.autograd.grad(list(found.values()), list(leaves.values()), gradients)
    return values | {f"gradient of {name}": x for name, x in zip(leaves, of_inputs, strict=True)}


def random_tensor(*size: int, like: Tensor, seed: int = 0) -> Tensor:
    """Normally distributed numbers that are equal on every device, in the type and on the device of `like`."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(like)


def differences(found: Tensors, expected: Tensors) -> dict[str, float]:
    """Norm of each tensor's difference, relative to the norm of the expected values."""
    pairs = {name: (found[name].float(), x.float()) for name, x in expected.items()}
    return {name: float((ours - x).norm() / x.norm()) for name, (ours, x) in pairs.items()}


def first_difference(found: Tensors, expected: Tensors, limit: float) -> str | None:
    """Describe the first tensor that differs by more than rounding; None if there is no such tensor."""
    for name, relative in differences(found, expected).items():
        if not relative <= limit:  # NaN counts as a difference
            return f"{name} is off by {relative:.1e} of its size, more than rounding explains ({limit:.0e})"
    return None
