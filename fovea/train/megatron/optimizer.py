"""Megatron's optimizer behind the calls that an update makes: rate, clipping and step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from fovea.config.backends import MegatronBackend
from fovea.config.run import Train
from fovea.train.lr_schedule import rate_of_run
from fovea.train.megatron.offload import Offloaded


class MegatronOptimizer:
    """AdamW of Megatron-core, whose moments and float32 weights are sharded over the data axis where there is one."""

    def __init__(self, model: DistributedDataParallel, train: Train, *, max_steps: int, dtype: torch.dtype) -> None:
        self._model = model
        self._train = train
        self._max_steps = max_steps
        # vectors do not decay, as in `train.adamw.make_adamw`: the default of Megatron too
        self.inner = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=train.learning_rate,
                weight_decay=train.weight_decay,
                adam_beta1=train.betas[0],
                adam_beta2=train.betas[1],
                adam_eps=train.adam_eps,
                clip_grad=train.max_grad_norm,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=model.ddp_config.use_distributed_optimizer,
            ),
            [model],
        )
        for group in self.inner.param_groups:
            # which Megatron leaves to a scheduler of its own, so that vectors would decay as well
            group["weight_decay"] = train.weight_decay * group["wd_mult"]
        self._make_moments()
        assert isinstance(train.backend, MegatronBackend)
        self._offloaded = Offloaded(self._states) if train.backend.optimizer_offload else None

    def on_device(self) -> AbstractContextManager[None]:
        """A block in which `inner` may be used: elsewhere its state is in the host's memory, if that is set."""
        return nullcontext() if self._offloaded is None else self._offloaded.on_device()

    def set_rate(self, step: int) -> float:
        """Set the learning rate for step 0, 1, ... of the run; returns it."""
        rate = rate_of_run(step, self._train, peak=self._train.learning_rate, max_steps=self._max_steps)
        for group in self.inner.param_groups:
            group["lr"] = rate
        return rate

    def zero_grad(self) -> None:
        """Empty the buffers of gradients."""
        self._model.zero_grad_buffer()
        self.inner.zero_grad()

    def norm(self) -> float:
        """Norm of the gradient of the whole model, before clipping; the same on all ranks."""
        self.inner.prepare_grads()
        return float(self.inner.get_grad_norm())

    def step(self) -> None:
        """Clip the gradients to `max_grad_norm` and take a step."""
        with self.on_device():
            self.inner.step()

    def sync_from_model(self) -> None:
        """Copy the model's weights into the float32 ones, after another optimizer has trained it."""
        with self.on_device():
            self.inner.reload_model_params()

    def _states(self) -> Iterator[torch.Tensor]:
        """Moments, and the float32 weights beside those of 16 bits; others are the model's own."""
        for optimizer in self.inner.chained_optimizers:
            for weights in optimizer.shard_fp32_from_float16_groups:
                yield from weights
            for state in optimizer.optimizer.state.values():
                yield from (x for x in state.values() if torch.is_tensor(x) and x.dim() > 0)

    def _make_moments(self) -> None:
        """Allocate the moments, which checkpoints hold before the first step too: by a step of size 0, not counted.

        Megatron-core has this function for the loading of files, but does not call it for those of all layouts.
        """
        for optimizer in self.inner.chained_optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            optimizer._init_optimizer_states_with_dummy_values()
            for state in optimizer.optimizer.state.values():
                if "step" in state:  # of torch's AdamW; Transformer Engine's counts in the groups
                    state["step"].zero_()
            for group in optimizer.param_groups:
                if "step" in group:
                    group["step"] = 0
