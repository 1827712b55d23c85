"""Requests to the engine, and the rows of their completions, as the host knows them.

Axes: `J` key heads, `D` width of a head, `L` prompt tokens, `T` tokens of a completion.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fovea.models.delta_rule import DeltaState
from fovea.types import Completion, Prompt, PromptImage, Request, Sampling


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptKeys:
    """KV cache of the earlier turns of an episode, without the last token, which was never fed back."""

    layers: Sequence[Tensor]
    """Keys and values [2, J, tokens, D] of each layer."""
    num_tokens: int
    num_images: int
    states: Sequence[DeltaState] = ()
    """States after these tokens, of each layer that is a delta net."""
    cost_tokens: int
    """Tokens of the KV cache that take as much memory as this."""


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedRequest:
    """A waiting or running request, with the future that its caller awaits."""

    request: Request
    done: asyncio.Future[Sequence[Completion]]
    positions_3L: NDArray[np.int64]
    """Positions of the prompt's tokens (`models.families`)."""
    first_position: int
    """Position of the completions' first token, on all axes."""
    kept: KeptKeys | None = None
    """KV cache of the earlier turns, which are the beginning of the prompt; from admission until it is prefilled."""
    preempted: RemovedRow | None = None
    """The completion that goes on with this request (`resumption`)."""

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
    def limit_tokens(self) -> int:
        """Maximum number of tokens of each completion."""
        return self.sampling.max_new_tokens

    @property
    def sampled_tokens(self) -> int:
        """Tokens at the end of the prompt that the preempted completion has sampled."""
        return 0 if self.preempted is None else len(self.preempted.token_ids_T) - 1


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRow:
    """Host-side record of one running completion."""

    request: QueuedRequest
    index: int
    """Number among the completions of its request."""
    first_step: int
    """Step of the batch that drew its first token, or would have, had the row always been in this batch."""
    searched_tokens: int = 0
    """Tokens already searched for stop strings."""
    answer_from: int = 0
    """Tokens in which no answer begins (`Sampling.answer_end`)."""

    @property
    def completion_id(self) -> str:
        return f"{self.request.request.id}/{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedRow:
    """A row that has left the batch, finished or preempted, with what it has sampled on the host."""

    row: DecodeRow
    token_ids_T: NDArray[np.int64]
    logprobs_T: NDArray[np.float32]
    stopped: bool
    """True if a stop token or string ended it; False at the length limit, and if it was preempted."""
    places_T: NDArray[np.int64]
    """Activation-tape places of all tokens but the last, which is never fed back."""


def by_prompt(requests: Iterable[QueuedRequest]) -> list[list[QueuedRequest]]:
    """Group requests with the same prompt, which is then prefilled once for all their completions.

    Such are later turns of episodes with the same answers and replies so far.
    """
    groups: dict[object, list[QueuedRequest]] = {}
    for each in requests:
        prompt = each.prompt
        key = (prompt.token_ids_L.tobytes(), *(image.key for image in prompt.images), each.limit_tokens)
        # the activation tape has a place for each request
        groups.setdefault(each.request.id if each.request.for_update else key, []).append(each)
    return list(groups.values())


def as_one(group: Sequence[QueuedRequest]) -> QueuedRequest:
    """A request for all completions of a group of `by_prompt`, which starts at the most tokens that any of it kept."""
    longest = max(group, key=lambda each: each.first_new_token)
    return replace(longest, request=replace(longest.request, n=sum(each.n for each in group))) if group[1:] else longest


def resumption(preempted: RemovedRow) -> QueuedRequest:
    """The request that a preempted row goes on with: all its tokens but the newest are prefilled with its prompt."""
    # the newest token was sampled and never fed: the next decode step feeds it
    origin, fed_T = preempted.row.request, preempted.token_ids_T[:-1]
    prompt = replace(origin.prompt, token_ids_L=np.concatenate([origin.prompt.token_ids_L, fed_T]))
    # text tokens have one position on all axes
    positions_3T = np.broadcast_to(
        origin.first_position + np.arange(len(fed_T)), (len(origin.positions_3L), len(fed_T))
    )
    return replace(
        origin,
        request=replace(origin.request, prompt=prompt, n=1),
        positions_3L=np.concatenate([origin.positions_3L, positions_3T], axis=1),
        preempted=preempted,
    )
