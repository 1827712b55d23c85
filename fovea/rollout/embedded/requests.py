"""The host's records of requests to the engine, and of the rows of their completions.

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
    """KV cache of an episode's earlier turns, without the last token, which was never fed to the network."""

    layers: Sequence[Tensor]
    """Keys and values [2, J, tokens, D] of each layer."""
    num_tokens: int
    num_images: int
    states: Sequence[DeltaState] = ()
    """State of each delta-net layer after these tokens."""
    cost_tokens: int
    """Memory of this record, in tokens of the KV cache."""


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedRequest:
    """A waiting or running request, with the future that its caller awaits."""

    request: Request
    done: asyncio.Future[Sequence[Completion]]
    positions_3L: NDArray[np.int64]
    """Positions of the prompt's tokens (`models.families`)."""
    first_position: int
    """Position of the completions' first token, equal on all axes."""
    kept: KeptKeys | None = None
    """KV cache of the earlier turns, with which the prompt begins; set from admission until the prefill."""
    preempted: RemovedRow | None = None
    """The preempted completion that this request continues (`resumption`)."""

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
        """Index of the first prompt token that the prefill must run."""
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
        """Number of tokens at the end of the prompt that the preempted completion had sampled."""
        return 0 if self.preempted is None else len(self.preempted.token_ids_T) - 1


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRow:
    """Host-side record of one running completion."""

    request: QueuedRequest
    index: int
    """Index among the completions of its request."""
    first_step: int
    """Batch step that sampled the row's first token; for a resumed row, as if it had always been in the batch."""
    searched_tokens: int = 0
    """Number of tokens already searched for stop strings."""
    answer_from: int = 0
    """Number of tokens already searched in which no answer begins (`Sampling.answer_end`)."""

    @property
    def completion_id(self) -> str:
        return f"{self.request.request.id}/{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedRow:
    """A finished or preempted row that was removed from the batch, with its sampled tokens on the host."""

    row: DecodeRow
    token_ids_T: NDArray[np.int64]
    logprobs_T: NDArray[np.float32]
    stopped: bool
    """True if a stop token or stop string ended it; False at the length limit or after a preemption."""
    places_T: NDArray[np.int64]
    """Activation-tape places of all tokens but the last, which is never fed to the network."""


def by_prompt(requests: Iterable[QueuedRequest]) -> list[list[QueuedRequest]]:
    """Group requests with equal prompts, so that each prompt is prefilled once for all of their completions.

    Later turns have equal prompts if their episodes have had the same answers and replies so far.
    """
    groups: dict[object, list[QueuedRequest]] = {}
    for each in requests:
        prompt = each.prompt
        key = (prompt.token_ids_L.tobytes(), *(image.key for image in prompt.images), each.limit_tokens)
        # recorded requests stay separate: the activation tape has a place for each
        groups.setdefault(each.request.id if each.request.for_update else key, []).append(each)
    return list(groups.values())


def as_one(group: Sequence[QueuedRequest]) -> QueuedRequest:
    """Merge a group of `by_prompt` into one request, with the longest kept KV cache among its requests."""
    longest = max(group, key=lambda each: each.first_new_token)
    return replace(longest, request=replace(longest.request, n=sum(each.n for each in group))) if group[1:] else longest


def resumption(preempted: RemovedRow) -> QueuedRequest:
    """Make the request that continues a preempted row; its tokens except the newest are prefilled with its prompt."""
    # the newest token was never fed to the network: the next decode step does that
    origin, fed_T = preempted.row.request, preempted.token_ids_T[:-1]
    prompt = replace(origin.prompt, token_ids_L=np.concatenate([origin.prompt.token_ids_L, fed_T]))
    # the position of a text token is equal on all axes
    positions_3T = np.broadcast_to(
        origin.first_position + np.arange(len(fed_T)), (len(origin.positions_3L), len(fed_T))
    )
    return replace(
        origin,
        request=replace(origin.request, prompt=prompt, n=1),
        positions_3L=np.concatenate([origin.positions_3L, positions_3T], axis=1),
        preempted=preempted,
    )
