"""AdamW on float32 master weights, with gradient clipping and a learning-rate schedule.

Master weights: Micikevicius et al., arXiv 1710.03740, section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fovea.config.run import Train
from fovea.train.torch.checkpoint import load_tensors, save_tensors
from fovea.train.torch.ranks import Ranks
from fovea.train.torch.sharding import full


class Optimizer:
    """AdamW on a set of parameters with a peak learning rate of their own; other settings are those of the run."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], train: Train, *, peak_learning_rate: float, max_steps: int
    ) -> None:
        self.parameters = parameters
        self._train = train
        self._peak = peak_learning_rate
        self._max_steps = max_steps
        self._masters = MasterWeights(parameters)
        self._adamw = make_adamw(
            list(self._masters.by_name.values()),
            betas=train.betas,
            eps=train.adam_eps,
            weight_decay=train.weight_decay,
        )

    def set_rate(self, step: int) -> float:
        """Set the learning rate for step 0, 1, ... of the run; returns it."""
        train = self._train
        rate = learning_rate(
            step,
            peak=self._peak,
            warmup_steps=train.lr_warmup_steps,
            total_steps=self._max_steps,
            shape=train.lr_schedule,
            final_frac=train.final_lr_frac,
        )
        set_learning_rate(self._adamw, rate)
        return rate

    def zero_grad(self) -> None:
        """Free the gradients of parameters and master weights."""
        self._adamw.zero_grad(set_to_none=True)
        for parameter in self.parameters.values():
            parameter.grad = None

    def clip(self) -> float:
        """Clip the gradients to a norm of `max_grad_norm`; returns the norm before clipping."""
        return float(full(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self._train.max_grad_norm)))

    def step(self) -> None:
        """Take an optimizer step on the master weights and round them into the model."""
        self._masters.take_gradients()
        self._adamw.step()
        self._masters.write_back()

    def sync_from_model(self) -> None:
        """Copy the model's weights into the master weights, after another optimizer has trained it."""
        self._masters.sync_from_model()

    def save(self, folder: Path, name: str, ranks: Ranks) -> None:
        """Write master weights and optimizer state into an existing folder; independent of the number of ranks."""
        save_tensors(folder, name, self._masters.by_name, self._adamw, ranks)

    def load(self, folder: Path, name: str) -> None:
        """Restore the state that `save` wrote; TrainError when it belongs to another model."""
        load_tensors(folder, name, self._masters.by_name, self._adamw)
        self._masters.write_back()


def make_adamw(
    parameters: Sequence[Tensor], *, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with a learning rate of 0, to be set before every step.

    Matrices decay, LoRA's two and a value head's among them. Vectors do not: they are biases, and scales of norms,
    which decay would draw to 0.
    """
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, betas=betas, eps=eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate


class MasterWeights:
    """Float32 tensors that the optimizer updates: float32 parameters themselves, and copies of all others."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        # an AdamW step at a rate of 1e-6 is below half a unit in the last place of nearly every bfloat16 weight: added
        # to the weight itself it would be rounded away, and the run would learn nothing
        self.by_name: dict[str, Tensor] = {
            name: parameter if parameter.dtype == torch.float32 else parameter.detach().float()
            for name, parameter in parameters.items()
        }
        for parameter, _ in self._copied():
            if not isinstance(parameter, DTensor):
                # autograd then adds the gradient of every micro-batch to a float32 sum: in 16 bits, small ones are lost
                # beside the sum of those before. FSDP2 has float32 sums of its own (`sharding.shard`).
                parameter.grad_dtype = torch.float32

    @torch.no_grad()
    def sync_from_model(self) -> None:
        """Copy the model's weights into the master weights."""
        for parameter, master in self._copied():
            master.copy_(parameter)

    def take_gradients(self) -> None:
        """Move the gradients from the parameters to the master weights; called before a step."""
        for parameter, master in self._copied():
            # float32 already, so that nothing is copied, except behind FSDP2
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the master weights into the model's parameters; called after a step or after loading."""
        for parameter, master in self._copied():
            parameter.copy_(master)

    def _copied(self) -> list[tuple[nn.Parameter, Tensor]]:
        pairs = ((self._parameters[name], master) for name, master in self.by_name.items())
        return [(parameter, master) for parameter, master in pairs if parameter is not master]


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    shape: Literal["constant", "linear", "cosine"],
    final_frac: float,
) -> float:
    """Learning rate of step 0, 1, ...: linear warm-up over `warmup_steps`, then `shape` down to `final_frac` x peak."""
    rise = min(1.0, (step + 1) / max(warmup_steps, 1))
    if shape == "constant":
        return peak * rise
    progress = min(1.0, max(0, step - warmup_steps) / max(total_steps - warmup_steps, 1))
    left = 1 - progress if shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * rise * (final_frac + (1 - final_frac) * left)
