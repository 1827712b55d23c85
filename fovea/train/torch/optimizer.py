"""AdamW on float32 copies of the weights, with clipped gradients: one optimizer for each thing that is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fovea.config.run import Train
from fovea.train.torch.checkpoint import load_tensors, save_tensors
from fovea.train.torch.lr_schedule import learning_rate
from fovea.train.torch.master_weights import MasterWeights


class Optimizer:
    """For these parameters, at a peak rate of their own; the schedule and everything else are the run's."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], train: Train, *, peak_learning_rate: float, max_steps: int
    ) -> None:
        self.parameters = parameters
        self._train = train
        self._peak = peak_learning_rate
        self._max_steps = max_steps
        self._masters = MasterWeights(parameters)
        self._adamw = make_adamw(
            list(self._masters.by_name.values()), betas=train.betas, weight_decay=train.weight_decay
        )

    def set_rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ... of the run; returns it."""
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

    def forget_gradients(self) -> None:
        self._adamw.zero_grad(set_to_none=True)
        for parameter in self.parameters.values():
            parameter.grad = None

    def clip(self) -> float:
        """Scale the gradients down to max_grad_norm; their norm before that."""
        return float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self._train.max_grad_norm))

    def step(self) -> None:
        self._masters.take_gradients()
        self._adamw.step()
        self._masters.write_back()

    def read_again(self) -> None:
        """Somebody else has trained the model: follow its weights."""
        self._masters.read_again()

    def save(self, folder: Path, name: str) -> None:
        """Weights and the optimizer's state, in an existing folder."""
        save_tensors(folder, name, self._masters.by_name, self._adamw)

    def load(self, folder: Path, name: str) -> None:
        """What `save` wrote. TrainError when it is of another model."""
        load_tensors(folder, name, self._masters.by_name, self._adamw)
        self._masters.write_back()


def make_adamw(parameters: Sequence[Tensor], *, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101); the rate is set before every step."""
    return torch.optim.AdamW(parameters, lr=0.0, betas=betas, weight_decay=weight_decay, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
