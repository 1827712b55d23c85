"""Packed row of prompts and their completions, the input of a training forward pass.

Axes: `N` tokens of the row, `A` actions of the row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fovea.models.activation_tape import RecordedOutputs
from fovea.models.shared_prefix.layout import SharedPrefixLayout
from fovea.models.vision.features import ImageFeatures
from fovea.types import PromptImage


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """Tokens `[prompt | completion 1 | ... | completion n | next prompt | ...]` with the actions to compute.

    Completions come without their last token, which is predicted and never an input: a prompt of 30 tokens with two
    completions of 5 and 3 tokens makes a row of 30 + 4 + 2 tokens and 8 actions.
    """

    token_ids_N: Tensor
    positions_3N: Tensor
    layout: SharedPrefixLayout
    images: tuple[PromptImage, ...]
    """Images in the order of their visual tokens in the row."""
    hidden_index_A: Tensor
    """Index in the row of the token whose hidden state predicts each action."""
    target_ids_A: Tensor
    """Token ids of the actions."""
    features: tuple[ImageFeatures, ...] | None = None
    """Features of the images from the rollout; None to run the vision tower."""
    recorded: RecordedOutputs | None = None
    """Linear outputs of the row from the rollout; None to compute them."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_N)

    @property
    def num_actions(self) -> int:
        return len(self.target_ids_A)
