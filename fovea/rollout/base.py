"""The interface of a rollout engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from fovea.errors import memory_for
from fovea.types import Completion, Metrics, Request


class Engine(Protocol):
    """An inference engine (embedded, vLLM or SGLang) in this process, in another one, or on a server.

    It receives new weights through `weights.base.WeightSync`.

    It never samples `Processor.banned_ids`. Its log-probs are log softmax(logits / temperature) with -inf at these ids
    (`models.sampling_distribution`), before top-k, top-p and min-p. The trainer computes the same log-probs, and the
    parity gate compares the two. Decision 018 lists the settings that make vLLM and SGLang return them.
    """

    @property
    def name(self) -> str:
        """Name of the engine in messages and in the parity gate; it says if decoding is approximate."""
        ...

    async def generate(self, request: Request) -> Sequence[Completion]:
        """Sample n completions of one prompt. Calls may overlap; a completion depends only on its own call."""
        ...

    async def sleep(self) -> None:
        """Free device memory for the update; no request may be running."""
        ...

    async def wake(self) -> None:
        """Accept requests again after `sleep`, and allocate the memory that they need."""
        ...

    async def close(self) -> None:
        """Cancel running requests and free all memory; the engine cannot be used afterwards."""
        ...


@runtime_checkable
class HasProcesses(Protocol):
    """An engine with its own processes, which may end while the engine is idle."""

    def check_processes(self) -> None:
        """Raise LostEngineError if one of the processes has ended."""
        ...


@runtime_checkable
class CountsPrefill(Protocol):
    """An engine that measures its prefill."""

    def prefill_metrics(self) -> Metrics:
        """Return the metrics of the prefill since the last call."""
        ...


@runtime_checkable
class HoldsImages(Protocol):
    """An engine whose requests' images are cached at both ends of the connections to its processes."""

    def forget_images(self) -> None:
        """Free the cached images; later requests send theirs again."""
        ...


def memory_for_rollout(max_batch_tokens: int | None) -> AbstractContextManager[None]:
    """Context manager for generation; an OutOfMemoryError then names the settings of the rollout."""
    setting = "rollout.engine.max_batch_tokens"
    fix = f"set {setting}, or lower" if max_batch_tokens is None else f"lower {setting}={max_batch_tokens}, or"
    return memory_for("the rollout", f"{fix} rollout.max_new_tokens")
