"""The interface of a rollout engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fovea.types import Completion, Request


class Engine(Protocol):
    """An inference engine that draws completions: embedded, vLLM or SGLang; in this process, its own, or remote.

    New weights reach it through `cluster.weights.WeightSync`.
    """

    async def generate(self, request: Request) -> Sequence[Completion]:
        """Draw n completions of one prompt. Many calls run at once; a completion depends on its own call alone."""
        ...

    async def pause(self) -> None:
        """Stop decoding; running requests stay where they are."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    async def sleep(self) -> None:
        """Free device memory for the update; nothing may be running."""
        ...

    async def wake(self) -> None:
        """Take the memory back after `sleep`, and requests again."""
        ...

    async def close(self) -> None:
        """End running requests and free everything; the engine is of no use afterwards."""
        ...
