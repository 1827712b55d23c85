"""PPO's value function on a Megatron model: a head on the hidden states of the last stage, and its AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fovea.config.algorithm import Critic
from fovea.models.heads import ValueHead
from fovea.train.adamw import AdamWSettings, make_adamw, set_learning_rate
from fovea.train.megatron.parallel import ParallelRank


class ReplicatedValueHead:
    """A value head and its AdamW, replicated on every process because it is small; gradients are summed over shares."""

    def __init__(
        self, critic: Critic, settings: AdamWSettings, place: ParallelRank, *, width: int, device: torch.device
    ) -> None:
        """`width` is the hidden size of the model."""
        self.head = ValueHead(width, detach_trunk=critic.trunk == "detached").to(device)
        self._settings = settings
        self._place = place
        self._adamw = make_adamw(list(self.head.parameters()), settings)

    @property
    def num_parameters(self) -> int:
        """Number of trained parameters."""
        return sum(parameter.numel() for parameter in self.head.parameters())

    def set_rate(self, step: int) -> float:
        """Set and return the learning rate for step 0, 1, ... of the run."""
        rate = self._settings.rate(step)
        set_learning_rate(self._adamw, rate)
        return rate

    def make_moments(self) -> None:
        """Do nothing: a head's moments are too small to run out of memory."""

    def zero_grad(self) -> None:
        """Set the gradients to zero, also on stages that compute no values."""
        for parameter in self.head.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def clip(self) -> Tensor:
        """Sum the gradients over all shares and clip them to `max_grad_norm`; returns the norm before clipping."""
        everyone = self._place.everyone
        if everyone.mesh is not None:
            # losses are multiplied by the number of shares (`MegatronPasses.backward`), and every tensor rank has the
            # same gradient
            times = self._place.data.size * (everyone.size // self._place.results.size)
            for parameter in self.head.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=everyone.mesh.get_group())
                parameter.grad /= times
        return torch.nn.utils.clip_grad_norm_(self.head.parameters(), self._settings.max_grad_norm)

    def step(self) -> None:
        """Take an optimizer step, after `clip`."""
        self._adamw.step()

    def state(self) -> dict[str, Any]:
        """The state for `load_state`, which is the same on all processes."""
        return {"head": self.head.state_dict(), "optimizer": self._adamw.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore head and moments; rate, decay and other settings stay those of the optimizer."""
        self.head.load_state_dict(state["head"])
        own = self._adamw.state_dict()["param_groups"]
        self._adamw.load_state_dict({"state": state["optimizer"]["state"], "param_groups": own})
