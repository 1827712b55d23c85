"""Megatron's optimizer with the calls that an update makes: rate, clipping and step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from fovea.train.adamw import AdamWSettings


class Offloaded:
    """Keeps the contents of tensors in host memory, except in the blocks that use them.

    The tensors stay the same objects while their GPU memory is free, so that an optimizer can keep referring to them.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """`tensors` lists them, each with a separate storage; it is called after each block, since they may change."""
        self._list = tensors
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._release()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A block in which the tensors can be read and written."""
        self._restore()
        try:
            yield
        finally:
            self._release()

    @torch.no_grad()
    def _release(self) -> None:
        self._tensors = list(self._list())
        if [x.shape for x in self._tensors] != [x.shape for x in self._copies]:
            # allocated once: pinning memory takes longer than a copy
            self._copies = [torch.empty_like(x, device="cpu", pin_memory=x.is_cuda) for x in self._tensors]
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._wait()
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)

    @torch.no_grad()
    def _restore(self) -> None:
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.untyped_storage().resize_(copy.nbytes)
            tensor.copy_(copy, non_blocking=True)
        self._wait()

    def _wait(self) -> None:
        """Wait for the copies, whose source may be overwritten or freed next."""
        if any(tensor.is_cuda for tensor in self._tensors):
            torch.cuda.synchronize()


LAYOUT = "fully_reshardable"
"""Checkpoint layout in which moments have the names and shapes of their weights, however these are divided."""


class MegatronOptimizer:
    """AdamW of Megatron-core, whose moments and float32 weights are sharded over the data axis."""

    def __init__(
        self, model: DistributedDataParallel, settings: AdamWSettings, *, dtype: torch.dtype, offload: bool
    ) -> None:
        """`offload` keeps moments and float32 weights in host memory between steps."""
        self._model = model
        self._settings = settings
        # vectors do not decay, as in `train.adamw.make_adamw`; this is Megatron's default too
        self.inner = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.peak_rate,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.betas[0],
                adam_beta2=settings.betas[1],
                adam_eps=settings.eps,
                clip_grad=settings.max_grad_norm,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=model.ddp_config.use_distributed_optimizer,
            ),
            [model],
        )
        for group in self.inner.param_groups:
            # Megatron leaves this to a separate scheduler, without which vectors would decay as well
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        self._make_moments()
        self._offloaded = Offloaded(self.states) if offload else None

    def on_device(self) -> AbstractContextManager[None]:
        """A block in which `inner` may be used; outside of it, an offloaded state is in host memory."""
        return nullcontext() if self._offloaded is None else self._offloaded.on_device()

    def set_rate(self, step: int) -> float:
        """Set and return the learning rate for step 0, 1, ... of the run."""
        rate = self._settings.rate(step)
        for group in self.inner.param_groups:
            group["lr"] = rate
        return rate

    def zero_grad(self) -> None:
        """Set the gradient buffers to zero."""
        self._model.zero_grad_buffer()
        self.inner.zero_grad()

    def make_moments(self) -> None:
        """Do nothing: the moments exist from the beginning."""

    def clip(self) -> Tensor:
        """Return the gradient norm [] of the whole model, which is the same on all ranks; `step` clips the gradient."""
        self.inner.prepare_grads()
        return torch.tensor(float(self.inner.get_grad_norm()))

    def step(self) -> None:
        """Clip the gradients to `max_grad_norm` and take a step."""
        with self.on_device():
            self.inner.step()

    def sync_from_model(self) -> None:
        """Copy the model's weights into the float32 weights, after another optimizer has trained the model."""
        with self.on_device():
            self.inner.reload_model_params()

    def state(self, weights: Mapping[str, Any], *, is_loading: bool) -> dict[Any, Any]:
        """State of the optimizer for a checkpoint; `weights` are this process's slices of the weights."""
        # names without an optimizer's number: experts that are divided among processes have a separate optimizer
        metadata = {"distrib_optim_sharding_type": LAYOUT, "chained_optim_avoid_prefix": True}
        state: dict[Any, Any] = self.inner.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
        return state

    def load_state(self, saved: Mapping[Any, Any]) -> None:
        """Restore moments and step count from a loaded `state`; settings stay those of the run.

        `saved` may hold other entries of the file as well.
        """
        optimizers = self.inner.chained_optimizers
        (num_steps,) = {group.get("step") for group in _groups(saved)}
        for number, optimizer in enumerate(optimizers):
            own = optimizer.state_dict()
            if num_steps is not None:
                for group in own["optimizer"]["param_groups"]:
                    group["step"] = num_steps
            moments = (saved if len(optimizers) == 1 else saved[number])["param_state"]
            optimizer.load_state_dict(own | {"param_state": moments, "param_state_sharding_type": LAYOUT})

    def states(self) -> Iterator[torch.Tensor]:
        """Moments and the float32 copies of 16-bit weights; weights that are float32 belong to the model."""
        for optimizer in self.inner.chained_optimizers:
            for weights in optimizer.shard_fp32_from_float16_groups:
                yield from weights
            for state in optimizer.optimizer.state.values():
                yield from (x for x in state.values() if torch.is_tensor(x) and x.dim() > 0)

    def _make_moments(self) -> None:
        """Allocate the moments by an uncounted step of size 0: a checkpoint before the first step holds them too.

        Megatron-core has this function for loading files, but does not call it for every layout.
        """
        for optimizer in self.inner.chained_optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            optimizer._init_optimizer_states_with_dummy_values()
            for state in optimizer.optimizer.state.values():
                if "step" in state:  # torch's AdamW; that of Transformer Engine counts in the groups
                    state["step"].zero_()
            for group in optimizer.param_groups:
                if "step" in group:
                    group["step"] = 0


def _groups(saved: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """The parameter groups in a checkpoint of one optimizer, or of several under their numbers."""
    states = [saved, *(state for key, state in saved.items() if isinstance(key, int))]
    return [group for state in states if "optimizer" in state for group in state["optimizer"]["param_groups"]]
