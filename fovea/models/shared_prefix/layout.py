"""Layout of a packed row, `[prompt 0 | its completions ... | prompt 1 | its completions ...]`, for attention.

Linear layers run on the row itself; attention runs on two padded blocks, one of prompts and one of completions, which
are gathered from the row by index.

Axes: `N` tokens of the row, `P` prompts, `L` tokens of the longest prompt, `G` completions of the largest group, `T`
tokens of the longest completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fovea.models.activation_tape import RecordedOutputs
from fovea.models.transfer import to_device
from fovea.models.vision.feature_cache import ImageFeatures
from fovea.types import PromptImage


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """Tokens `[prompt | completion 1 | ... | completion n | next prompt | ...]` with the actions to compute.

    Completions come without their last token, which is predicted and never an input: a prompt of 30 tokens with two
    completions of 5 and 3 tokens makes a row of 30 + 4 + 2 tokens and 8 actions. Equal completions of a prompt
    appear once (`train.row_assignment`): with a second copy of the 5 tokens the row has 13 actions, of which 8 are
    computed.
    """

    token_ids_N: Tensor
    positions_3N: Tensor
    layout: SharedPrefixLayout
    images: tuple[PromptImage, ...]
    """Images in the order of their visual tokens in the row."""
    hidden_index_U: Tensor
    """Index in the row of the token whose hidden state predicts each action."""
    target_ids_U: Tensor
    """Token ids of the actions."""
    computed_A: Tensor
    """Index of each action of all completions among the actions of the unequal completions."""
    visual_index_V: Tensor
    """Index in the row of each visual token."""
    predictor_index_M: Tensor
    """The distinct values of `hidden_index_U`, ascending."""
    predictor_U: Tensor
    """Index of each value of `hidden_index_U` in `predictor_index_M`."""
    features: tuple[ImageFeatures, ...] | None = None
    """Features of the images from the rollout; None to run the vision tower."""
    recorded: RecordedOutputs | None = None
    """Linear outputs of the row from the rollout; None to compute them."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_N)

    @property
    def num_actions(self) -> int:
        return len(self.computed_A)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixLayout:
    """Index tensors that gather a packed row into attention blocks and scatter these back."""

    prompt_index_PL: Tensor
    """Row index of each prompt token; padding points at token 0."""
    prompt_valid_PL: Tensor
    """False at padding."""
    completion_index_PGT: Tensor
    """Row index of each completion token; padding points at token 0."""
    completion_valid_PGT: Tensor
    return_index_N: Tensor
    """Index of each token of the row in the two blocks, flattened and concatenated."""
    lengths: tuple[tuple[int, tuple[int, ...]], ...]
    """Number of tokens of each prompt, with the numbers of tokens of its completions."""

    @property
    def has_completions(self) -> bool:
        """True if any completion has a token in the row."""
        return self.completion_index_PGT.numel() > 0

    def to(self, device: torch.device) -> SharedPrefixLayout:
        """The layout with its tensors on a device."""
        moved = {
            field.name: to_device(value, device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return SharedPrefixLayout(**moved, lengths=self.lengths)


def shared_prefix_layout(
    prompt_lengths: Sequence[int], completion_lengths: Sequence[Sequence[int]]
) -> SharedPrefixLayout:
    """Layout of a row of prompts, each followed by its completions, from their numbers of tokens."""
    prompt_P = torch.tensor(prompt_lengths)
    largest = max(map(len, completion_lengths), default=0)
    completion_PG = torch.tensor(
        [[*lengths, *[0] * (largest - len(lengths))] for lengths in completion_lengths], dtype=torch.long
    ).view(len(prompt_P), largest)
    # exclusive cumulative sums give the starts of groups in the row, and of completions in their group
    tokens_P = prompt_P + completion_PG.sum(1)
    prompt_start_P = tokens_P.cumsum(0) - tokens_P
    completion_start_PG = (prompt_start_P + prompt_P)[:, None] + completion_PG.cumsum(1) - completion_PG
    prompt_index_PL, prompt_valid_PL = _padded(prompt_start_P, prompt_P)
    completion_index_PGT, completion_valid_PGT = _padded(completion_start_PG, completion_PG)
    return SharedPrefixLayout(
        prompt_index_PL=prompt_index_PL,
        prompt_valid_PL=prompt_valid_PL,
        completion_index_PGT=completion_index_PGT,
        completion_valid_PGT=completion_valid_PGT,
        return_index_N=_return_index(prompt_index_PL, prompt_valid_PL, completion_index_PGT, completion_valid_PGT),
        lengths=tuple(
            (prompt, tuple(lengths)) for prompt, lengths in zip(prompt_lengths, completion_lengths, strict=True)
        ),
    )


def _padded(start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Row indices [..., longest] of consecutive tokens from each start, and a mask that is False at padding."""
    longest = int(length.max()) if length.numel() else 0
    offset = torch.arange(longest)
    valid = offset < length[..., None]
    # padding must be a valid index for the gather; its values are masked afterwards
    return torch.where(valid, start[..., None] + offset, 0), valid


def _return_index(prompt: Tensor, prompt_valid: Tensor, completion: Tensor, completion_valid: Tensor) -> Tensor:
    """Inverse of the gather into the two blocks, [N]."""
    # padding also points at token 0: scattering it would overwrite the slot of token 0
    index = torch.cat([prompt.flatten(), completion.flatten()])
    valid = torch.cat([prompt_valid.flatten(), completion_valid.flatten()])
    slots = valid.nonzero()[:, 0]
    return torch.empty(len(slots), dtype=torch.long).scatter_(0, index[slots], slots)
