"""The input of one forward pass: a packed row of prompts and their completions.

Axes: `N` tokens of the row, `A` action (completion) tokens of the row.
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
    """`[prompt | completion 1 | ... | completion n | next prompt | ...]`, each completion without its last token.

    The last token of a completion is only ever predicted, so it costs nothing: a prompt of 30 tokens with two
    completions of 5 and 3 tokens makes a row of 30 + 4 + 2 tokens and 8 actions.
    """

    token_ids_N: Tensor
    positions_3N: Tensor
    layout: SharedPrefixLayout
    images: tuple[PromptImage, ...]
    """In the order of their pads in the row."""
    hidden_index_A: Tensor
    """Token of the row whose hidden state predicts the action."""
    target_ids_A: Tensor
    """The action."""
    features: tuple[ImageFeatures, ...] | None = None
    """Of the images, where they are known; else the vision tower is asked."""
    recorded: RecordedOutputs | None = None
    """Outputs of linear layers that are known."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_N)

    @property
    def num_actions(self) -> int:
        return len(self.target_ids_A)
