"""AdamW on float32 master weights, with gradient clipping and a learning-rate schedule.

Master weights: Micikevicius et al., arXiv 1710.03740, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from fovea.models.transfer import copy_pinned
from fovea.train.adamw import AdamWSettings, make_adamw, set_learning_rate
from fovea.train.torch.checkpoint import load_optimizer, load_weights, optimizer_folder, optimizer_tensors
from fovea.train.torch.sharding import full
from fovea.utils.host_waits import awaited

BUCKET_BYTES = 256 * 2**20
"""Size of the gradients that are copied to host memory together."""
VECTOR = 16
"""AdamW's CPU kernel computes this many elements at once, and the rest of a tensor with other rounding."""


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
            self._moments(master)

    def _moments(self, master: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.adamw.state[master]
        if not state:
            # set all of them or none, even if an allocation fails
            state.update(
                step=torch.zeros((), device=master.device),
                exp_avg=torch.zeros_like(master),
                exp_avg_sq=torch.zeros_like(master),
            )
        return state

    def step(self) -> None:
        """Take an optimizer step on the master weights and round them into the model."""
        if self.masters.on_host:
            self._step_on_host()
            return
        self.masters.take_gradients()
        self.adamw.step()
        self.masters.write_back()

    @torch.no_grad()
    def _step_on_host(self) -> None:
        """Take the same step bucket by bucket: the host computes with one while the gradients of the next arrive."""
        groups = {master: group for group in self.adamw.param_groups for master in group["params"]}
        buckets = self.masters.buckets()
        for bucket, gradients in zip(buckets, _gradients_on_host(buckets), strict=True):
            sizes = [rows.of(rows.master).numel() for rows in bucket]
            for rows, gradient in zip(bucket, gradients.split(sizes), strict=True):
                group, state, master = groups[rows.master], self._moments(rows.master), rows.of(rows.master)
                adamw(
                    [master],
                    [gradient.view_as(master)],
                    [rows.of(state["exp_avg"])],
                    [rows.of(state["exp_avg_sq"])],
                    [],
                    # all rows of a parameter take the same step
                    [state["step"] if rows.are_last else state["step"].clone()],
                    fused=True,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                copy_pinned(master, rows.of(rows.parameter))

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
        self.on_host = on_host and not any(isinstance(parameter, DTensor) for parameter in parameters.values())
        """True if these are copies in host memory."""
        # an AdamW step at a rate of 1e-6 is below half a unit in the last place of nearly every bfloat16 weight: added
        # to the weight itself it would be rounded away, and the run would learn nothing
        self.by_name: dict[str, Tensor] = {
            name: _host_copy(parameter) if self.on_host else _as_float32(parameter)
            for name, parameter in parameters.items()
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
        """Move the gradients from the parameters to the master weights on the same device; called before a step."""
        for parameter, master in self._copied():
            # gradients are float32 already: nothing is copied
            master.grad, parameter.grad = parameter.grad, None

    def buckets(self) -> list[list[Rows]]:
        """Divide the weights that have a gradient into buckets, whose gradients take `BUCKET_BYTES` at most.

        A larger parameter is divided by its rows.
        """
        buckets, room = list[list[Rows]](), 0
        most = BUCKET_BYTES // torch.float32.itemsize
        for parameter, master in self._copied():
            if parameter.grad is None:
                continue
            count = len(master) if master.ndim else 1
            width = master.numel() // max(count, 1)
            # whole vectors, so that AdamW rounds each element as it does in an undivided tensor
            multiple = VECTOR // gcd(VECTOR, width)
            step = max(most // max(width, 1) // multiple, 1) * multiple
            for start in range(0, count, step):
                rows = Rows(parameter, master, slice(start, start + step), are_last=start + step >= count)
                size = rows.of(master).numel()
                if size > room or not buckets:
                    buckets.append([])
                    room = most
                buckets[-1].append(rows)
                room -= size
        return buckets

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the master weights into the model's parameters; called after a step or after loading."""
        for parameter, master in self._copied():
            if self.on_host:
                copy_pinned(master, parameter)
            else:
                parameter.copy_(master)

    def _copied(self) -> list[tuple[nn.Parameter, Tensor]]:
        pairs = ((self._parameters[name], master) for name, master in self.by_name.items())
        return [(parameter, master) for parameter, master in pairs if parameter is not master]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a parameter and of its master weights in host memory; a parameter without axes is one row."""

    parameter: nn.Parameter
    master: Tensor
    index: slice
    are_last: bool
    """True if these rows end the parameter."""

    def of(self, tensor: Tensor) -> Tensor:
        """A view of these rows in a tensor that has the shape of the parameter."""
        view: Tensor = torch.atleast_1d(tensor)[self.index]
        return view

    @property
    def gradient(self) -> Tensor:
        """A view of the gradient of these rows."""
        assert self.parameter.grad is not None
        return self.of(self.parameter.grad)


def _gradients_on_host(buckets: Sequence[Sequence[Rows]]) -> Iterator[Tensor]:
    """Free the gradients, and yield them as one flat tensor per bucket, which the next but one overwrites.

    While a bucket is in use, the next one is copied.
    """
    if not buckets:
        return
    most = max(sum(rows.of(rows.master).numel() for rows in bucket) for bucket in buckets)
    device = buckets[0][0].parameter.device
    buffers = [torch.empty(most, pin_memory=device.type == "cuda") for _ in buckets[:2]]

    def send(number: int) -> tuple[Tensor, torch.cuda.Event | None]:
        flat = torch.cat([rows.gradient.flatten() for rows in buckets[number]])
        for rows in buckets[number]:
            if rows.are_last:
                rows.parameter.grad = None
        buffer = buffers[number % 2][: len(flat)].copy_(awaited(flat), non_blocking=True)
        return buffer, torch.cuda.current_stream(device).record_event() if flat.is_cuda else None

    sent = send(0)
    for number in range(1, len(buckets) + 1):
        gradients, copied = sent
        # queued before the host waits; the buffer is that of the bucket before, whose step is taken
        if number < len(buckets):
            sent = send(number)
        if copied is not None:
            copied.synchronize()
        yield gradients


def _as_float32(parameter: Tensor) -> Tensor:
    return parameter if parameter.dtype == torch.float32 else parameter.detach().float()


def _host_copy(parameter: Tensor) -> Tensor:
    """A float32 copy in host memory, pinned if a GPU copies from and to it."""
    copied = torch.empty(parameter.shape, dtype=torch.float32, pin_memory=parameter.is_cuda)
    return copied.copy_(parameter.detach())
