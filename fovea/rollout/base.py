"""What rollout asks of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fovea.types import Completion, Prompt, Sampling, Weights


class Engine(Protocol):
    """Draws completions: embedded, vLLM or SGLang; local or remote."""

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int) -> Sequence[Completion]:
        """n completions of one prompt. Many calls run at once; a completion depends on its own call alone."""
        ...

    def load_weights(self, weights: Weights, version: int) -> None:
        """Draw from these weights from now on; completions carry `version`."""
        ...

    def sleep(self) -> None:
        """Give memory to the trainer."""
        ...

    def wake(self) -> None:
        """Take it back."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...
