"""Requests to the embedded engine, and the state of those that run.

Axes: `P` running groups, `G` completions of a group, `T` tokens of a completion.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fovea.rollout.embedded.cache import GroupCache
from fovea.rollout.embedded.sampler import RowSettings, row_settings, uniforms
from fovea.types import Completion, Prompt, Sampling


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One call of `generate`."""

    prompt: Prompt
    sampling: Sampling
    n: int
    done: asyncio.Future[Sequence[Completion]]

    @property
    def cache_tokens(self) -> int:
        """Keys that it may need: the prompt once, and every completion."""
        return self.prompt.num_tokens + self.n * self.sampling.max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Everything that a decoding step reads and writes, one row per running group."""

    requests: tuple[Request, ...]
    cache: GroupCache
    next_position_P: Tensor
    uniforms_PGT: Tensor
    tokens_PGT: Tensor
    logprobs_PGT: Tensor
    lengths_PG: Tensor
    running_PG: Tensor
    stopped_PG: Tensor
    """Ended by a stop token or string, not by length."""
    limit_P: Tensor
    """max_new_tokens"""
    settings: RowSettings
    """Of the P x G rows."""
    places_PGT: Tensor
    """Of the tokens fed back, on the tape; -1: not recorded."""
    first_place_P: Tensor

    @property
    def size(self) -> int:
        return self.running_PG.shape[1]

    @property
    def rows_P(self) -> Tensor:
        return torch.arange(len(self.requests), device=self.limit_P.device)

    @property
    def index_P(self) -> Tensor:
        """Place of the newest token: before a step the one whose keys are not stored yet, after it the one to draw.

        A group that has ended and not yet left stays at its last place.
        """
        return torch.minimum(self.cache.own_lengths_P, self.limit_P - 1)

    def record(self, index_P: Tensor, tokens_B: Tensor, logprobs_B: Tensor, stop_ids: Tensor) -> None:
        """Write drawn tokens at `index_P`; completions end at a stop token or at their limit."""
        tokens_PG, logprobs_PG = tokens_B.view(self.running_PG.shape), logprobs_B.view(self.running_PG.shape)
        self.tokens_PGT[self.rows_P, :, index_P] = tokens_PG
        self.logprobs_PGT[self.rows_P, :, index_P] = logprobs_PG
        self.lengths_PG.add_(self.running_PG)
        stopped_PG = self.running_PG & torch.isin(tokens_PG, stop_ids)
        self.stopped_PG.logical_or_(stopped_PG)
        self.running_PG.logical_and_(~stopped_PG & (self.lengths_PG < self.limit_P[:, None]))

    def select(self, groups: Sequence[int]) -> Groups:
        """Only these groups."""
        index = torch.tensor(groups, dtype=torch.long, device=self.limit_P.device)
        requests = tuple(self.requests[group] for group in groups)
        return Groups(
            requests=requests,
            settings=_settings(requests, self.limit_P.device),
            cache=self.cache.select(index),
            **{name: getattr(self, name)[index] for name in TENSORS},
        )

    def join(self, other: Groups) -> Groups:
        """The groups of both; tensors over T get room for the longer."""
        requests = self.requests + other.requests
        return Groups(
            requests=requests,
            settings=_settings(requests, self.limit_P.device),
            cache=self.cache.join(other.cache),
            **{name: _stack(getattr(self, name), getattr(other, name)) for name in TENSORS},
        )


TENSORS = (
    "places_PGT",
    "first_place_P",
    "next_position_P",
    "uniforms_PGT",
    "tokens_PGT",
    "logprobs_PGT",
    "lengths_PG",
    "running_PG",
    "stopped_PG",
    "limit_P",
)


def new_groups(requests: Sequence[Request], cache: GroupCache, device: torch.device) -> Groups:
    """State of requests whose prompts are in the cache and whose completions are empty."""
    room = max(request.sampling.max_new_tokens for request in requests)
    shape = (len(requests), requests[0].n)
    drawn = [
        torch.from_numpy(uniforms(request.sampling.seed, request.n, request.sampling.max_new_tokens))
        for request in requests
    ]
    padded = [torch.nn.functional.pad(u, (0, room - u.shape[1])) for u in drawn]
    return Groups(
        requests=tuple(requests),
        settings=_settings(requests, device),
        cache=cache,
        next_position_P=torch.tensor([request.prompt.next_position for request in requests], device=device),
        uniforms_PGT=torch.stack(padded).to(device),
        tokens_PGT=torch.zeros(*shape, room, dtype=torch.long, device=device),
        logprobs_PGT=torch.zeros(*shape, room, device=device),
        lengths_PG=torch.zeros(shape, dtype=torch.long, device=device),
        running_PG=torch.ones(shape, dtype=torch.bool, device=device),
        stopped_PG=torch.zeros(shape, dtype=torch.bool, device=device),
        places_PGT=torch.full((*shape, room), -1, dtype=torch.long, device=device),
        first_place_P=torch.full((len(requests),), -1, dtype=torch.long, device=device),
        limit_P=torch.tensor([request.sampling.max_new_tokens for request in requests], device=device),
    )


def _settings(requests: Sequence[Request], device: torch.device) -> RowSettings:
    return row_settings([request.sampling for request in requests for _ in range(request.n)], device)


def _stack(a: Tensor, b: Tensor) -> Tensor:
    if a.ndim < 3:
        return torch.cat([a, b])
    longest = max(a.shape[-1], b.shape[-1])
    pad = torch.nn.functional.pad
    return torch.cat([pad(a, (0, longest - a.shape[-1])), pad(b, (0, longest - b.shape[-1]))])
