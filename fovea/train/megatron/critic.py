"""PPO's value function on the trunk of a Megatron model: a head on the states of the last stage, and its AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from fovea.config.algorithm import Critic as CriticSettings
from fovea.config.run import Config
from fovea.models.heads import ValueHead
from fovea.train.megatron.parallel import Place
from fovea.train.optimizer_steps import critic_rate, make_adamw, rate_of_run, set_learning_rate


class Critic:
    """A value head that every process has whole, since it is small; its gradient is that of all shares."""

    def __init__(
        self, config: Config, settings: CriticSettings, place: Place, *, width: int, device: torch.device
    ) -> None:
        """`width` is that of the model's states."""
        self.head = ValueHead(width, detach_trunk=settings.trunk == "detached").to(device)
        self.warmup_steps = settings.warmup_steps
        """Number of updates at the start of the run that train the value function only."""
        self._train = config.train
        self._max_steps = config.max_steps
        self._peak = critic_rate(settings, config.train)
        self._place = place
        self._parameters = list(self.head.parameters())
        self._adamw = make_adamw(
            self._parameters,
            betas=config.train.betas,
            eps=config.train.adam_eps,
            weight_decay=config.train.weight_decay,
        )

    @property
    def num_parameters(self) -> int:
        """Number of parameters under training."""
        return sum(parameter.numel() for parameter in self._parameters)

    def set_rate(self, step: int) -> float:
        """Set the learning rate for step 0, 1, ... of the run; returns it."""
        rate = rate_of_run(step, self._train, peak=self._peak, max_steps=self._max_steps)
        set_learning_rate(self._adamw, rate)
        return rate

    def zero_grad(self) -> None:
        """Begin the sum of gradients anew; also on stages that no value is computed on."""
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)

    def clip(self) -> float:
        """Sum the gradients up over all shares and clip them to `max_grad_norm`; returns the norm before clipping."""
        everyone = self._place.everyone
        if everyone.mesh is not None:
            # losses are multiplied by the number of shares (`Passes.backward`), and each slice of the tensors has them
            times = self._place.dealt.size * (everyone.size // self._place.results.size)
            for parameter in self._parameters:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=everyone.mesh.get_group())
                parameter.grad /= times
        return float(torch.nn.utils.clip_grad_norm_(self._parameters, self._train.max_grad_norm))

    def step(self) -> None:
        """Take an optimizer step, after `clip`."""
        self._adamw.step()

    def state(self) -> dict[str, Any]:
        """State that `load` restores, equal on all processes."""
        return {"head": self.head.state_dict(), "optimizer": self._adamw.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore head and moments; rate, decay and other settings stay those of the optimizer."""
        self.head.load_state_dict(state["head"])
        own = self._adamw.state_dict()["param_groups"]
        self._adamw.load_state_dict({"state": state["optimizer"]["state"], "param_groups": own})
