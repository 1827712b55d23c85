"""What a caller asks of the embedded engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from fovea.types import Completion, Prompt, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request may need of the cache at most, while so many of its completions run."""

    prompt_tokens: int
    rows: int
    limit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One call of `generate`."""

    prompt: Prompt
    sampling: Sampling
    n: int
    done: asyncio.Future[Sequence[Completion]]

    @property
    def demand(self) -> Demand:
        """With every completion still to come."""
        return Demand(prompt_tokens=self.prompt.num_tokens, rows=self.n, limit_tokens=self.limit_tokens)

    @property
    def limit_tokens(self) -> int:
        """Tokens that each completion may have."""
        return self.sampling.max_new_tokens
