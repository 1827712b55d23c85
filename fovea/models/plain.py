"""The plain path: transformers' own forward on padded rows of one completion each; the slow twin of packed rows.

It needs only the input names of a model family, and so runs families that have no fast path.

Axes: `R` completions of a packed row, `L` tokens of the longest `prompt + completion`, `T` tokens of an answer, `A`
actions, `U` actions of the unequal completions of a packed row, `E` width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fovea.models.families.base import ModelFamily
from fovea.models.policy_network import PolicyNetwork
from fovea.models.sampling_distribution import sampling_logprobs_
from fovea.models.shared_prefix.layout import PackedRow
from fovea.types import PromptImage


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRow:
    """A completion behind a copy of its prompt."""

    token_ids_L: Tensor
    """Token ids without the last one, which is predicted and never an input."""
    images: tuple[PromptImage, ...]
    hidden_index_A: list[int]
    """Indices of the tokens whose hidden states predict the actions."""


class PlainVLM(PolicyNetwork):
    """PolicyNetwork of any family, run by transformers' own forward."""

    def action_states(self, row: PackedRow) -> Tensor:
        """Last hidden states [U, E], after the final norm, from which the actions are predicted."""
        rows = list(plain_rows(row, self.family))
        hidden_RLE = plain_states(self.network, self.family, rows, self.dtype)
        return torch.cat([hidden_LE[each.hidden_index_A] for hidden_LE, each in zip(hidden_RLE, rows, strict=True)])


def plain_states(network: Any, family: ModelFamily, rows: Sequence[PlainRow], dtype: torch.dtype) -> Tensor:
    """Last hidden states [R, L, E] of rows padded on the right, with positions and masks made by transformers.

    `dtype` is that of the pass; sharded weights have another between passes.
    """
    ids_RL = pad_sequence([row.token_ids_L for row in rows], batch_first=True)
    mask_RL = pad_sequence([torch.ones_like(row.token_ids_L) for row in rows], batch_first=True)
    inputs = plain_inputs(family, ids_RL, [image for row in rows for image in row.images], dtype)
    out = network.base_model(input_ids=ids_RL, attention_mask=mask_RL, use_cache=False, **inputs)
    hidden_RLE: Tensor = out.last_hidden_state
    return hidden_RLE


def plain_inputs(
    family: ModelFamily, ids_RL: Tensor, images: Sequence[PromptImage], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Arguments of transformers' forward besides ids and mask, pixels in the type of the pass."""
    inputs = family.forward_inputs(ids_RL, images)
    # not every vision tower converts its input itself
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


def plain_rows(row: PackedRow, family: ModelFamily) -> Iterator[PlainRow]:
    """Unpack a packed row into one row per completion, in the order of its actions."""
    start, images, actions = 0, iter(row.images), deque(row.hidden_index_U.tolist())
    for prompt_tokens, completions in row.layout.lengths:
        prompt_L = row.token_ids_N[start : start + prompt_tokens]
        of_prompt = _images_of(prompt_L, images, family)
        start += prompt_tokens
        last_of_prompt = start - 1
        if not completions:
            # a filler of one of several ranks, which has to run every module
            yield PlainRow(token_ids_L=prompt_L, images=of_prompt, hidden_index_A=[])
        for tokens in completions:
            own_L = row.token_ids_N[start : start + tokens]
            # the first token after a prompt is always an action: an environment replies to the policy's first answer
            assert actions.popleft() == last_of_prompt, "a completion whose first token is not an action"
            hidden = [prompt_tokens - 1]
            while actions and start <= actions[0] < start + tokens:
                hidden.append(actions.popleft() - start + prompt_tokens)
            yield PlainRow(
                token_ids_L=torch.cat([prompt_L, own_L]),
                images=(*of_prompt, *_images_of(own_L, images, family)),
                hidden_index_A=hidden,
            )
            start += tokens


def _images_of(ids_L: Tensor, images: Iterator[PromptImage], family: ModelFamily) -> tuple[PromptImage, ...]:
    """Take the next images from the iterator until their visual tokens match those in the ids."""
    missing, found = int((ids_L == family.image_token_id).sum()), list[PromptImage]()
    while missing:
        found.append(next(images))
        missing -= found[-1].num_tokens
    return tuple(found)


def plain_logprobs(
    network: Any,
    family: ModelFamily,
    banned_ids: Sequence[int],
    prompt_ids_L: Tensor,
    images: tuple[PromptImage, ...],
    answer_ids_T: Tensor,
) -> Tensor:
    """Log-probs [T] of an answer at temperature 1, from the logits of transformers' forward."""
    ids_L = torch.cat([prompt_ids_L, answer_ids_T])[None]
    inputs = plain_inputs(family, ids_L, images, network.dtype)
    logits = network(input_ids=ids_L, attention_mask=torch.ones_like(ids_L), use_cache=False, **inputs).logits[0]
    banned_K = torch.tensor(banned_ids, dtype=torch.long, device=logits.device)
    logprobs_TW = sampling_logprobs_(logits[len(prompt_ids_L) - 1 : -1].float(), 1.0, banned_K)
    found: Tensor = logprobs_TW.gather(1, answer_ids_T[:, None])[:, 0]
    return found
