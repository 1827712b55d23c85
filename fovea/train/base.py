"""The interface of a policy: what the driver awaits, and what one of its worker processes does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fovea.config.run import Algorithm
from fovea.types import Batch, Metrics, ParameterCount, Prompt, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Per-token inputs of the advantages and of the loss that take a forward pass before the update."""

    old_logprobs: bool = False
    reference_logprobs: bool = False
    values: bool = False

    @staticmethod
    def of(algorithm: Algorithm) -> Needs:
        """Compute old and reference log-probs and values, skipping what the update recomputes anyway."""
        return Needs(
            # with one optimizer step per epoch the first epoch sees every sample before any step
            old_logprobs=algorithm.minibatches > 1 or algorithm.needs_old_logprobs,
            reference_logprobs=algorithm.kl is not None,
            values=algorithm.critic is not None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prompt and the answer to imitate, for supervised fine-tuning."""

    prompt: Prompt
    answer_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The model under training, as the start of a run prints it."""

    device: str
    device_name: str | None
    """Product name of the GPU; None on a CPU."""
    parameters: tuple[ParameterCount, ...]
    num_workers: int = 1


class Policy(Protocol):
    """The model being trained, by one process or many, as the driver sees it. Calls never overlap."""

    async def annotate(self, batch: Batch, needs: Needs) -> Batch:
        """Add old and reference log-probs and values to the samples of a batch, in as few passes as they take."""
        ...

    async def update(self, batch: Batch) -> Metrics:
        """All optimizer steps of one batch."""
        ...

    async def sft(self, pairs: Sequence[Pair]) -> Metrics:
        """One step of supervised fine-tuning, the warm-up before RL; `loss` is the mean over answer tokens."""
        ...

    async def snapshot_reference(self) -> None:
        """Begin RL with the weights as the warm-up left them: they are the reference of the KL term."""
        ...

    async def save(self, folder: Path) -> None:
        """Write everything that `load` needs to go on bit for bit into an existing folder."""
        ...

    async def load(self, folder: Path) -> None:
        """Take the state of a folder that `save` wrote; TrainError when it is of another model."""
        ...

    async def export(self, folder: Path) -> None:
        """Write the present weights, adapters merged, and their config, as transformers reads them."""
        ...

    def describe(self) -> ModelFacts:
        """Devices and trainable parameters."""
        ...

    async def close(self) -> None:
        """Free the model; the policy is of no use afterwards."""
        ...


class PolicyWorker(Protocol):
    """One process of a policy: the same calls, in step with its peers where it has any."""

    def annotate(self, batch: Batch, needs: Needs) -> Batch: ...

    def update(self, batch: Batch) -> Metrics: ...

    def sft(self, pairs: Sequence[Pair]) -> Metrics: ...

    def snapshot_reference(self) -> None: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None: ...

    def describe(self) -> ModelFacts: ...

    def close(self) -> None: ...

    def weights(self) -> Weights:
        """All weights under their Hugging Face names, adapters merged; not copied where they need not be."""
        ...
