"""The interface of a rollout engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from fovea.errors import memory_for
from fovea.types import Completion, Metrics, Request


class Engine(Protocol):
    """An inference engine: embedded, vLLM or SGLang; in this process, in its own, or remote.

    New weights reach it through `weights.base.WeightSync`.

    It never samples `Processor.banned_ids`. Its log-probs are log softmax(logits / temperature) with -inf at these ids
    (`models.sampling_distribution`), before top-k, top-p and min-p. The trainer computes the same log-probs, and the
    parity gate compares the two. Decision 018 lists the settings that make vLLM and SGLang return them.
    """

    @property
    def name(self) -> str:
        """Name of the engine in messages and in the parity gate; includes approximate decoding."""
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
    """An engine with its own processes, which may end while it has nothing to do."""

    def check_processes(self) -> None:
        """Raise LostEngineError if one of them has ended."""
        ...


@runtime_checkable
class CountsPrefill(Protocol):
    """An engine that counts the work of its prefill."""

    def prefill_metrics(self) -> Metrics:
        """Metrics of the prefill since the last call."""
        ...


@runtime_checkable
class HoldsImages(Protocol):
    """An engine for which images of requests are held, on both ends of the connections to its processes."""

    def forget_images(self) -> None:
        """Free them; later requests bring theirs again."""
        ...


def memory_for_rollout(max_batch_tokens: int | None) -> AbstractContextManager[None]:
    """Block in which an engine generates; its OutOfMemoryError names the settings of the rollout."""
    setting = "rollout.engine.max_batch_tokens"
    fix = f"set {setting}, or lower" if max_batch_tokens is None else f"lower {setting}={max_batch_tokens}, or"
    return memory_for("the rollout", f"{fix} rollout.max_new_tokens")
