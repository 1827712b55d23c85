"""A queued request, and the interface of a KV cache to the decoding batch.

Axes: `B` live completions, `J` key heads, `D` width of a head, `N` tokens of a prefill row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fovea.models.decoder import Attend
from fovea.types import Completion, Prompt, PromptImage, Request, Sampling

Store = Callable[[int, Tensor, Tensor], None]
"""(layer, keys [N, J, D], values [N, J, D])"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens `start` to `end` of the prompt that stands at `prompt` among the live ones."""

    prompt: int
    start: int
    end: int


class Cache(Protocol):
    """Holds live prompts and completions in the order of `add`, but for the moves of `remove`."""

    def cost(self, demands: Sequence[Demand]) -> int:
        """Tokens of the budget that these take together, each at its longest: what fits is never evicted."""
        ...

    def add(self, requests: Sequence[QueuedRequest]) -> int:
        """Places for their prompts and, behind the live rows, n empty completions each; the first prompt's place."""
        ...

    def writer(self, spans: Sequence[Span]) -> Store:
        """Stores the keys and values of a row of prompt tokens, layer by layer."""
        ...

    def prompt(self, layer: int, span: Span) -> tuple[Tensor, Tensor]:
        """Keys and values [J, span.end, D] of a prompt from its first token on."""
        ...

    def remove(self, ended: Sequence[int]) -> None:
        """Rows that have ended leave as in `fill_holes`, and prompts that lost their last row."""
        ...

    def held(self, row: int, tokens: int) -> list[Tensor]:
        """Copies of a live row's keys and values, [2, J, prompt + tokens, D] per layer, its prompt's included."""
        ...

    def clear(self) -> None:
        """Forget all rows and prompts."""
        ...

    def step(self, stored_B: Tensor, longest: int, level: bool) -> Attend:
        """Attention of one more token per row, `stored_B` tokens into each completion.

        `longest` is the largest of them among rows that run, `level` says that all of those are equal.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request may need of the cache at most, while so many of its completions run."""

    prompt_tokens: int
    rows: int
    limit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptKeys:
    """Keys and values of the turns before, all but the last token's, which was never fed back."""

    layers: Sequence[Tensor]
    """[2, J, tokens, D] each."""
    num_tokens: int
    num_images: int

    @property
    def num_bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueuedRequest:
    """A request that waits or runs, and the future of its caller."""

    request: Request
    done: asyncio.Future[Sequence[Completion]]
    positions_3L: NDArray[np.int64]
    """Of the prompt's tokens (`models.families`)."""
    first_position: int
    """Of the completions' first token, on all axes."""
    kept: KeptKeys | None = None
    """Keys of the beginning of the prompt, from the turn before."""

    @property
    def prompt(self) -> Prompt:
        return self.request.prompt

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def n(self) -> int:
        return self.request.n

    @property
    def first_new_token(self) -> int:
        """Where prefill begins in the prompt."""
        return 0 if self.kept is None else self.kept.num_tokens

    @property
    def new_images(self) -> tuple[PromptImage, ...]:
        """Images of the prompt from `first_new_token` on."""
        return self.prompt.images if self.kept is None else self.prompt.images[self.kept.num_images :]

    @property
    def demand(self) -> Demand:
        """With every completion still to come."""
        return Demand(prompt_tokens=self.prompt.num_tokens, rows=self.n, limit_tokens=self.limit_tokens)

    @property
    def limit_tokens(self) -> int:
        """Tokens that each completion may have."""
        return self.sampling.max_new_tokens
