"""AdamW on float32 master weights, with gradient clipping and a learning-rate schedule.

Master weights: Micikevicius et al., arXiv 1710.03740, section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fovea.train.adamw import AdamWSettings, make_adamw, set_learning_rate
from fovea.train.torch.checkpoint import load_optimizer, load_weights, optimizer_folder, optimizer_tensors
from fovea.train.torch.sharding import full


class Optimizer:
    """AdamW on a set of parameters, with float32 master weights."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: AdamWSettings,
        *,
        on_host: bool = False,
        rate_ratios: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`on_host` as in `MasterWeights`; `rate_ratios` are learning rates by name, relative to that of the others."""
        self.parameters = parameters
        self._settings = settings
        self.masters = MasterWeights(parameters, on_host=on_host)
        ratios = [rate_ratios.get(name, 1.0) for name in self.masters.by_name]
        self.adamw = make_adamw(list(self.masters.by_name.values()), settings, ratios)

    @property
    def num_parameters(self) -> int:
        """Number of trained parameters, over all ranks."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    def set_rate(self, step: int) -> float:
        """Set the learning rates for step 0, 1, ... of the run; returns the rate of weights without a ratio."""
        rate = self._settings.rate(step)
        set_learning_rate(self.adamw, rate)
        return rate

    def zero_grad(self) -> None:
        """Free the gradients of parameters and master weights."""
        self.adamw.zero_grad(set_to_none=True)
        for parameter in self.parameters.values():
            parameter.grad = None

    def clip(self) -> Tensor:
        """Clip the gradients to a norm of `max_grad_norm`; returns the norm [] before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self._settings.max_grad_norm)
        return full(norm)

    def make_moments(self) -> None:
        """Allocate the moments that AdamW would make in its first step; existing ones stay."""
        for master in self.masters.by_name.values():
            state = self.adamw.state[master]
            if not state:
                # set all of them or none, even if an allocation fails
                state.update(
                    step=torch.zeros((), device=master.device),
                    exp_avg=torch.zeros_like(master),
                    exp_avg_sq=torch.zeros_like(master),
                )

    def step(self) -> None:
        """Take an optimizer step on the master weights and round them into the model."""
        self.masters.take_gradients()
        self.adamw.step()
        self.masters.write_back()

    def tensors(self, name: str) -> dict[str, Mapping[str, Tensor]]:
        """Tensors that `load` restores, by the folder they are saved in: master weights and optimizer state."""
        weights = self.masters.by_name
        return {name: weights, optimizer_folder(name): optimizer_tensors(weights, self.adamw)}

    def load(self, folder: Path, name: str) -> None:
        """Restore `tensors(name)` from their folders in `folder`; TrainError when they belong to another model."""
        load_weights(folder, name, self.masters.by_name)
        load_optimizer(folder, name, self.masters.by_name, self.adamw)
        self.masters.write_back()


class MasterWeights:
    """Float32 tensors that the optimizer updates: float32 parameters themselves, and copies of all others.

    With `on_host`, all parameters are copied to host memory, where the optimizer then keeps its state and computes.
    Shards are there already (`sharding.shard`) and are not copied.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, on_host: bool = False) -> None:
        self._parameters = dict(parameters)
        copies = on_host and not any(isinstance(parameter, DTensor) for parameter in parameters.values())
        # an AdamW step at a rate of 1e-6 is below half a unit in the last place of nearly every bfloat16 weight: added
        # to the weight itself it would be rounded away, and the run would learn nothing
        self.by_name: dict[str, Tensor] = {
            name: _host_copy(parameter) if copies else _as_float32(parameter) for name, parameter in parameters.items()
        }
        for parameter, _ in self._copied():
            # autograd then adds the gradient of every micro-batch to a float32 sum: in 16 bits, small gradients would
            # be lost when added to the sum of earlier ones
            parameter.grad_dtype = torch.float32

    @torch.no_grad()
    def sync_from_model(self) -> None:
        """Copy the model's weights into the master weights, after another optimizer has trained the model."""
        for parameter, master in self._copied():
            master.copy_(parameter)

    def take_gradients(self) -> None:
        """Move the gradients from the parameters to the master weights; called before a step."""
        for parameter, master in self._copied():
            # gradients are float32 already: nothing is copied, except to the host
            master.grad = None if parameter.grad is None else parameter.grad.to(master.device)
            parameter.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the master weights into the model's parameters; called after a step or after loading."""
        for parameter, master in self._copied():
            parameter.copy_(master)

    def _copied(self) -> list[tuple[nn.Parameter, Tensor]]:
        pairs = ((self._parameters[name], master) for name, master in self.by_name.items())
        return [(parameter, master) for parameter, master in pairs if parameter is not master]


def _as_float32(parameter: Tensor) -> Tensor:
    return parameter if parameter.dtype == torch.float32 else parameter.detach().float()


def _host_copy(parameter: Tensor) -> Tensor:
    """A float32 copy in host memory, pinned if a GPU copies from and to it."""
    copied = torch.empty(parameter.shape, dtype=torch.float32, pin_memory=parameter.is_cuda)
    return copied.copy_(parameter.detach())
