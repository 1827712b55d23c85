"""Queued requests, and the interface of the KV cache.

Axes: `B` rows of the decode batch, `J` key heads, `D` width of a head, `N` tokens of a prefill pass, `L` prompt tokens.
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
"""Writes the keys and values of a prefill pass: (layer, keys [N, J, D], values [N, J, D])."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Tokens `start` to `end` of one prompt in the cache."""

    prompt: int
    """Index among the prompts in the cache."""
    start: int
    end: int


class Cache(Protocol):
    """Keys and values of prompts and rows, in the order of `add`; `remove` compacts them (`compaction.fill_holes`)."""

    def cost(self, demands: Sequence[Demand]) -> int:
        """Worst-case tokens of these requests together; what fits the budget is never evicted."""
        ...

    def add(self, requests: Sequence[QueuedRequest]) -> int:
        """Append their prompts, and n empty rows for each; returns the index of the first prompt."""
        ...

    def writer(self, spans: Sequence[TokenSpan]) -> Store:
        """Returns a function that stores a prefill pass over these spans, layer by layer."""
        ...

    def prompt(self, layer: int, span: TokenSpan) -> tuple[Tensor, Tensor]:
        """Keys and values [J, span.end, D] of a prompt, from its first token to the end of the span."""
        ...

    def remove(self, finished: Sequence[int]) -> None:
        """Drop finished rows, and the prompts that have no row left."""
        ...

    def copy_row(self, row: int, tokens: int) -> list[Tensor]:
        """Copies of the keys and values of a row and its prompt, [2, J, prompt + tokens, D] per layer."""
        ...

    def clear(self) -> None:
        """Drop all rows and prompts."""
        ...

    def step(self, stored_B: Tensor, longest: int, level: bool) -> Attend:
        """Attention of a decode step: one more token per row, after `stored_B` tokens of its completion.

        `longest` bounds `stored_B` in running rows; `level` says that it is equal in all of them.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Worst-case cache demand of a request with `rows` completions still running."""

    prompt_tokens: int
    rows: int
    limit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptKeys:
    """KV cache of the earlier turns of an episode, without the last token, which was never fed back."""

    layers: Sequence[Tensor]
    """Keys and values [2, J, tokens, D] of each layer."""
    num_tokens: int
    num_images: int

    @property
    def num_bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueuedRequest:
    """A waiting or running request, with the future that its caller awaits."""

    request: Request
    done: asyncio.Future[Sequence[Completion]]
    positions_3L: NDArray[np.int64]
    """Positions of the prompt's tokens (`models.families`)."""
    first_position: int
    """Position of the completions' first token, on all axes."""
    kept: KeptKeys | None = None
    """KV cache of the earlier turns, which are the beginning of the prompt."""

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
        """Index of the first prompt token that prefill has to run."""
        return 0 if self.kept is None else self.kept.num_tokens

    @property
    def new_images(self) -> tuple[PromptImage, ...]:
        """Images of the prompt from `first_new_token` on."""
        return self.prompt.images if self.kept is None else self.prompt.images[self.kept.num_images :]

    @property
    def demand(self) -> Demand:
        """Demand with all completions running."""
        return Demand(prompt_tokens=self.prompt.num_tokens, rows=self.n, limit_tokens=self.limit_tokens)

    @property
    def limit_tokens(self) -> int:
        """Maximum number of tokens of each completion."""
        return self.sampling.max_new_tokens
