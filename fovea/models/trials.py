"""Trials of kernels before a run uses them: outputs and gradients on random inputs, beside those of plain functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fovea.errors import is_out_of_memory
from fovea_gym.errors import first_line

Tensors = Mapping[str, Tensor]


def why_refused(trial: Callable[[], str | None]) -> str | None:
    """The finding of a trial, or type and text of the error that it raises; None where it finds nothing wrong.

    No table of the types, widths and devices that a kernel supports is published. Out-of-memory errors are raised: they
    say nothing of the kernel.
    """
    try:
        return trial()
    except Exception as error:  # a kernel, its compiler, its package and the C compiler may raise anything
        if is_out_of_memory(error):
            raise
        line = first_line(error)
        # Triton's compiler begins with a place in the kernel's source, and ends with the reason
        return f"{line} {str(error).splitlines()[-1].strip()}" if line.endswith(":") else line


@torch.inference_mode(mode=False)  # whoever asks first may be within one, where nothing has gradients
@torch.enable_grad()
def values_and_gradients(function: Callable[..., Tensors], inputs: Tensors) -> dict[str, Tensor]:
    """Named outputs of a function, and the gradients of its inputs from one random gradient of each output."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    # a kernel may overwrite its inputs, which autograd forbids for leaves
    found = function(**{name: x.clone() for name, x in leaves.items()})
    gradients = [random_tensor(*x.shape, like=x, seed=seed) for seed, x in enumerate(found.values())]
    # the outputs as they are now: a backward pass may overwrite them, too
    values = {name: x.detach().clone() for name, x in found.items()}
    of_inputs = torch.autograd.grad(list(found.values()), list(leaves.values()), gradients)
    return values | {f"gradient of {name}": x for name, x in zip(leaves, of_inputs, strict=True)}


def random_tensor(*size: int, like: Tensor, seed: int = 0) -> Tensor:
    """Normal numbers that are the same on every device, in the type and on the device of `like`."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(like)


def differences(found: Tensors, expected: Tensors) -> dict[str, float]:
    """Norm of each tensor's difference, relative to that of the expected values."""
    pairs = {name: (found[name].float(), x.float()) for name, x in expected.items()}
    return {name: float((ours - x).norm() / x.norm()) for name, (ours, x) in pairs.items()}


def first_difference(found: Tensors, expected: Tensors, limit: float) -> str | None:
    """The first tensor that differs by more than rounding does; None where none does."""
    for name, relative in differences(found, expected).items():
        if not relative <= limit:  # NaN is a difference
            return f"{name} is off by {relative:.1e} of its size, and rounding moves it by less than {limit:.0e}"
    return None
