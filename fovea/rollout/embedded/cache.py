"""Keys and values of running groups: each prompt's once, each completion's own beside it.

Axes: `P` groups, `G` completions of a group, `H` query heads, `J` key heads, `Q` = H / J query heads of a key head,
`D` width of a head, `L` tokens of the longest prompt, `T` room for tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCache:
    """One entry per layer; written in place as completions grow."""

    prompt_keys: list[Tensor]
    """[P, J, L, D]"""
    prompt_values: list[Tensor]
    own_keys: list[Tensor]
    """[P, G, J, T, D]"""
    own_values: list[Tensor]
    prompt_lengths_P: Tensor
    own_lengths_P: Tensor
    """Tokens that each group's completions have stored; they grow in step."""

    @staticmethod
    def of_prompts(
        keys: list[Tensor],
        values: list[Tensor],
        prompt_lengths_P: Tensor,
        *,
        group_size: int,
        room_tokens: int,
    ) -> GroupCache:
        """A cache whose completions are still empty."""
        # zeros, not empty: a masked position must not hold NaN, since 0 * NaN is NaN
        prompts, heads, _, width = keys[0].shape
        shape = (prompts, group_size, heads, room_tokens, width)
        return GroupCache(
            prompt_keys=keys,
            prompt_values=values,
            own_keys=[keys[0].new_zeros(shape) for _ in keys],
            own_values=[keys[0].new_zeros(shape) for _ in keys],
            prompt_lengths_P=prompt_lengths_P,
            own_lengths_P=torch.zeros_like(prompt_lengths_P),
        )

    def select(self, groups: Tensor) -> GroupCache:
        """Only these groups."""
        return GroupCache(
            prompt_keys=[x[groups] for x in self.prompt_keys],
            prompt_values=[x[groups] for x in self.prompt_values],
            own_keys=[x[groups] for x in self.own_keys],
            own_values=[x[groups] for x in self.own_values],
            prompt_lengths_P=self.prompt_lengths_P[groups],
            own_lengths_P=self.own_lengths_P[groups],
        )

    def join(self, other: GroupCache) -> GroupCache:
        """The groups of both, with room for the longer."""
        return GroupCache(
            prompt_keys=_stack(self.prompt_keys, other.prompt_keys),
            prompt_values=_stack(self.prompt_values, other.prompt_values),
            own_keys=_stack(self.own_keys, other.own_keys),
            own_values=_stack(self.own_values, other.own_values),
            prompt_lengths_P=torch.cat([self.prompt_lengths_P, other.prompt_lengths_P]),
            own_lengths_P=torch.cat([self.own_lengths_P, other.own_lengths_P]),
        )


def _stack(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat(_pad_to_longer(a, b)) for a, b in zip(first, second, strict=True)]


def _pad_to_longer(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    longest = max(a.shape[-2], b.shape[-2])
    return F.pad(a, (0, 0, 0, longest - a.shape[-2])), F.pad(b, (0, 0, 0, longest - b.shape[-2]))


class CacheAttention:
    """One decoding step of every completion against a `GroupCache`."""

    def __init__(self, cache: GroupCache, scale: float) -> None:
        self._cache = cache
        self._scale = scale
        room = cache.own_keys[0].shape[-2]
        # a group that has ended and not yet left may be full: it writes its last slot again, and nobody reads it
        self._slot_P = cache.own_lengths_P.clamp(max=room - 1)
        self._group_P = torch.arange(len(self._slot_P), device=self._slot_P.device)
        cache.own_lengths_P.add_(1).clamp_(max=room)
        self._own_tokens = int(cache.own_lengths_P.max())
        self._prompt_mask = _hide_beyond(cache.prompt_lengths_P, cache.prompt_keys[0].shape[-2])
        self._own_mask = _hide_beyond(cache.own_lengths_P, self._own_tokens)

    def __call__(self, layer: int, query_BHD: Tensor, key_BJD: Tensor, value_BJD: Tensor) -> Tensor:
        """[B, H, D] for B = P x G completions; a group's queries meet its prompt in one matrix product."""
        cache = self._cache
        own_keys, own_values = cache.own_keys[layer], cache.own_values[layer]
        groups, size, heads, _, width = own_keys.shape
        own_keys[self._group_P, :, :, self._slot_P] = key_BJD.view(groups, size, heads, width)
        own_values[self._group_P, :, :, self._slot_P] = value_BJD.view(groups, size, heads, width)
        query_PGJQD = (query_BHD * self._scale).view(groups, size, heads, -1, width)
        weights = self._weights(query_PGJQD, cache.prompt_keys[layer], own_keys[..., : self._own_tokens, :])
        prompt_tokens = cache.prompt_keys[layer].shape[-2]
        from_prompt = _by_head(weights[..., :prompt_tokens]) @ cache.prompt_values[layer]
        from_own = weights[..., prompt_tokens:] @ own_values[..., : self._own_tokens, :]
        return (_by_group(from_prompt, size) + from_own).reshape(query_BHD.shape)

    def _weights(self, query_PGJQD: Tensor, prompt_keys: Tensor, own_keys: Tensor) -> Tensor:
        """Attention weights [P, G, J, Q, L + own tokens]."""
        to_prompt = _by_group(_by_head(query_PGJQD) @ prompt_keys.mT, query_PGJQD.shape[1])
        to_own = query_PGJQD @ own_keys.mT
        if self._prompt_mask is not None:
            to_prompt = to_prompt + self._prompt_mask
        if self._own_mask is not None:
            to_own = to_own + self._own_mask
        scores = torch.cat([to_prompt, to_own], dim=-1)
        return scores.softmax(dim=-1, dtype=torch.float32).to(query_PGJQD.dtype)


def _hide_beyond(lengths_P: Tensor, size: int) -> Tensor | None:
    """Additive mask [P, 1, 1, 1, size]; None when every group fills the block."""
    hidden_PX = torch.arange(size, device=lengths_P.device) >= lengths_P[:, None]
    if not bool(hidden_PX.any()):
        return None
    return torch.zeros(hidden_PX.shape, device=lengths_P.device).masked_fill(hidden_PX, -torch.inf)[:, None, None, None]


def _by_head(x_PGJQX: Tensor) -> Tensor:
    """[P, J, G * Q, X]: all queries of a group that share a key head, side by side."""
    return x_PGJQX.transpose(1, 2).flatten(2, 3)


def _by_group(x_PJYX: Tensor, group_size: int) -> Tensor:
    """Back to [P, G, J, Q, X]."""
    split: Tensor = x_PJYX.unflatten(2, (group_size, -1))
    return split.transpose(1, 2)
