"""The plain path: transformers' own forward on padded rows, one for every completion; the twin of the packed pass.

It needs nothing of a model family but the names of its inputs, and is the first home of a family without a fast path.

Axes: `R` continuations of a packed row, `L` tokens of the longest with its prompt, `A` actions, `E` width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fovea.models.families.base import ModelFamily
from fovea.models.policy_network import PolicyNetwork
from fovea.models.shared_prefix.packed_row import PackedRow
from fovea.types import PromptImage


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRow:
    """One continuation with its own copy of the prompt."""

    token_ids_L: Tensor
    """Without the last token, which is only predicted."""
    images: tuple[PromptImage, ...]
    first_action: int
    """The token whose hidden state predicts the first action: the last of the prompt."""


class PlainVLM(PolicyNetwork):
    """A network of any family, run by transformers' forward."""

    def action_states(self, row: PackedRow) -> Tensor:
        rows = list(plain_rows(row, self.family))
        hidden_RLE = plain_states(self.network, self.family, rows)
        spans = zip(hidden_RLE, rows, strict=True)
        states = [hidden_LE[each.first_action : len(each.token_ids_L)] for hidden_LE, each in spans]
        return torch.cat(states)[row.is_action_T]


def plain_states(network: Any, family: ModelFamily, rows: Sequence[PlainRow]) -> Tensor:
    """Last hidden states [R, L, E] of rows padded on the right; positions and masks are left to transformers."""
    ids_RL = pad_sequence([row.token_ids_L for row in rows], batch_first=True)
    mask_RL = pad_sequence([torch.ones_like(row.token_ids_L) for row in rows], batch_first=True)
    inputs = family.forward_inputs(ids_RL, [image for row in rows for image in row.images])
    out = network.base_model(input_ids=ids_RL, attention_mask=mask_RL, use_cache=False, **inputs)
    hidden_RLE: Tensor = out.last_hidden_state
    return hidden_RLE


def plain_rows(row: PackedRow, family: ModelFamily) -> Iterator[PlainRow]:
    """Unpack: each continuation behind a copy of its prompt, in the order of the row's actions."""
    start, images = 0, iter(row.images)
    for prompt_tokens, completions in row.layout.lengths:
        prompt_L = row.token_ids_N[start : start + prompt_tokens]
        own = _images_of(prompt_L, images, family) if completions else ()
        start += prompt_tokens
        for tokens in completions:
            ids_L = torch.cat([prompt_L, row.token_ids_N[start : start + tokens]])
            later = _images_of(ids_L[prompt_tokens:], images, family)
            yield PlainRow(token_ids_L=ids_L, images=own + later, first_action=prompt_tokens - 1)
            start += tokens


def _images_of(ids_L: Tensor, images: Iterator[PromptImage], family: ModelFamily) -> tuple[PromptImage, ...]:
    """As many of the next images as have their visual tokens here."""
    missing, found = int((ids_L == family.image_token_id).sum()), list[PromptImage]()
    while missing:
        found.append(next(images))
        missing -= found[-1].num_tokens
    return tuple(found)


def plain_logprobs(
    network: Any, family: ModelFamily, prompt_ids_L: Tensor, images: tuple[PromptImage, ...], answer_ids_T: Tensor
) -> Tensor:
    """Log-probs [T] of an answer by the network's own logits."""
    ids_L = torch.cat([prompt_ids_L, answer_ids_T])[None]
    inputs = family.forward_inputs(ids_L, images)
    logits = network(input_ids=ids_L, attention_mask=torch.ones_like(ids_L), use_cache=False, **inputs).logits[0]
    logprobs = F.log_softmax(logits[len(prompt_ids_L) - 1 : -1].float(), dim=-1)
    found: Tensor = logprobs.gather(1, answer_ids_T[:, None])[:, 0]
    return found
