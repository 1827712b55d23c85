"""Rows of a micro-batch, concatenated without padding (THD): each row attends only to its own tokens.

Axes: `N` tokens of all rows, `L` tokens of a row, `U` actions of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import pad

from fovea.models.families.base import ModelFamily
from fovea.models.plain import PlainRow
from fovea.types import PromptImage

_rotate_by_row: Callable[..., Tensor] = rope_utils._apply_rotary_pos_emb_thd


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Inputs of one pass of the language model."""

    token_ids_N: Tensor
    positions_3N: Tensor
    sequences: PackedSeqParams
    """Bounds of the rows, for Transformer Engine's attention."""
    images: list[PromptImage]
    """Images of all rows, in the order of their visual tokens."""
    hidden_index_U: list[int]
    """Index of the token whose hidden state predicts each action."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_N)


def pack_rows(rows: Sequence[PlainRow], family: ModelFamily, *, multiple_of: int) -> PackedRows:
    """Join rows; the last is padded on the right, where causal attention hides it, to a multiple of `multiple_of`."""
    device = rows[0].token_ids_L.device
    lengths = [len(row.token_ids_L) for row in rows]
    hidden_index_U = [
        start + index
        for start, row in zip(accumulate(lengths, initial=0), rows, strict=False)
        for index in row.hidden_index_A
    ]
    padding = -sum(lengths) % multiple_of
    lengths[-1] += padding
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    positions = [family.positions(row.token_ids_L.numpy(force=True), row.images, 0)[0] for row in rows]
    return PackedRows(
        token_ids_N=pad(torch.cat([row.token_ids_L for row in rows]), (0, padding)),
        positions_3N=pad(torch.from_numpy(np.concatenate(positions, 1)), (0, padding)).to(device),
        sequences=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        ),
        images=[image for row in rows for image in row.images],
        hidden_index_U=hidden_index_U,
    )


@contextmanager
def attending_to_own_row(language: Any, rows: PackedRows) -> Iterator[None]:
    """Pass positions and row boundaries to Megatron's language model.

    The bridge's vision-language models have no argument for either and would treat all tokens as a single row.
    """
    positions_31N = rows.positions_3N[:, None]
    # by hooks: the code between the bridge's model and these modules belongs to Megatron
    hooks = [
        language.rotary_pos_emb.register_forward_pre_hook(lambda _, given: (positions_31N, *given[1:])),
        language.decoder.register_forward_pre_hook(
            lambda _, given, named: (given, named | {"packed_seq_params": rows.sequences}), with_kwargs=True
        ),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def rotate_packed_rows(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_group: Any = None, **options: Any) -> Tensor:
    """Rotate queries or keys by the angles of their tokens, without a copy of the row boundaries to the host.

    Megatron's function, with its arguments, copies each boundary separately, twice per layer.
    """
    if cp_group is None or cp_group.size() > 1 or len(freqs) != len(t):
        return _rotate_by_row(t, cu_seqlens, freqs, cp_group=cp_group, **options)
    rotated: Tensor = rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs, **options)
    return rotated.squeeze(1)


def rotate_without_waits() -> None:
    """Make Megatron call `rotate_packed_rows`, in this process and also where backward passes recompute layers."""
    rope_utils._apply_rotary_pos_emb_thd = rotate_packed_rows
