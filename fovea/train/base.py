"""Interfaces of the policy and its optimizers, and the records that their calls use."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fovea.config.algorithm import Algorithm
from fovea.types import Batch, Metrics, ParameterCount, Prompt

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Per-token inputs of advantages and loss that need a forward pass before the update."""

    old_logprobs: bool = False
    reference_logprobs: bool = False
    masked_logprobs: bool = False
    values: bool = False
    beside_engine: bool = False
    """The engine is awake: passes run over one group at a time, and the limit stays if memory runs out."""

    @staticmethod
    def of(algorithm: Algorithm, *, dropout: bool = False) -> Needs:
        """The inputs that need a pass before the update; those that the update recomputes anyway are left out.

        Old log-probs are left out where the first step is on-policy or where they are the engine's, and reference
        log-probs where the KL term is off. With `dropout` the update cannot recompute old log-probs, because dropout
        changes the policy that sampled.
        """
        return Needs(
            # with one optimizer step per epoch the first epoch passes over every sample before the weights change, so
            # its own log-probs are the old ones
            old_logprobs=algorithm.old_logprobs == "trainer"
            and (algorithm.minibatches > 1 or algorithm.needs_old_logprobs or dropout),
            reference_logprobs=algorithm.kl is not None,
            masked_logprobs=algorithm.augmentation is not None,
            values=algorithm.critic is not None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SftExample:
    """A prompt and the answer to imitate, for supervised fine-tuning."""

    prompt: Prompt
    answer_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Device and parameter counts of the model under training, printed at the start of a run."""

    device: str
    device_name: str | None
    """Product name of the GPU; None on a CPU."""
    parameters: tuple[ParameterCount, ...]
    num_saved: int = 0
    """Number of parameters that a checkpoint holds with their optimizer moments, including a value function's."""
    num_workers: int = 1
    """Number of training processes, each on a separate device."""


class Policy(Protocol):
    """The model under training, in one process or many, as seen by the driver.

    Each of its processes has a `train.update.TrainedPolicy`, whose methods of these names do the work; all processes
    make the same calls in the same order. Only `finish_save` may overlap other calls.
    """

    async def compute_logprobs(self, batch: Batch, needs: Needs) -> Batch:
        """Add the required old and reference log-probs and values to the samples of a batch."""
        ...

    async def update(self, batch: Batch) -> Metrics:
        """Take all optimizer steps of one batch; returns the metrics of the update."""
        ...

    async def sft(self, pairs: Sequence[SftExample]) -> Metrics:
        """Take one step of supervised fine-tuning (the warm-up before RL); `loss` is the mean over answer tokens."""
        ...

    async def snapshot_reference(self) -> None:
        """Make the weights the start of RL, after the warm-up: copy them to KL reference, master weights and critic."""
        ...

    async def save(self, folder: Path) -> None:
        """Copy the state from which `load` resumes bit for bit, and begin to write it into an existing folder.

        All workers must see the folder; each writes its part while training continues. `finish_save` must follow.
        """
        ...

    async def finish_save(self) -> None:
        """Wait until what `save` began is on disk, or raise OSError; other calls but `save` may be made meanwhile."""
        ...

    async def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote; TrainError when it belongs to another model."""
        ...

    async def limit_microbatches(self, max_tokens: int) -> None:
        """Start with micro-batches of at most `max_tokens` and no kept engine memory, after memory ran out."""
        ...

    async def export(self, folder: Path) -> None:
        """Write a Hugging Face model folder: the current weights with adapters merged, and their config."""
        ...

    def describe(self) -> ModelFacts:
        """Return devices and parameter counts."""
        ...

    async def close(self) -> None:
        """Free the model; no other call may follow."""
        ...


CALLS = frozenset(name for name, member in vars(Policy).items() if inspect.iscoroutinefunction(member))
"""Names of the policy's calls, which are forwarded to its processes."""


class PolicyOptimizer(Protocol):
    """The optimizer of the policy or of its value function, for updates and supervised fine-tuning."""

    def set_rate(self, step: int) -> float:
        """Set and return the learning rate for step 0, 1, ... of the run."""
        ...

    def zero_grad(self) -> None:
        """Free all gradients, or set them to zero."""
        ...

    def make_moments(self) -> None:
        """Allocate the moments if they do not exist yet."""
        ...

    def clip(self) -> Tensor:
        """Return the gradient norm [] before clipping, which happens here or in `step`; it is the same on all ranks."""
        ...

    def step(self) -> None:
        """Take a step with the clipped gradient."""
        ...
