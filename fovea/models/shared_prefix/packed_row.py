"""Packed row of prompts and their completions, the input of a training forward pass.

Indices are made on the host, with the row: made from tensors on a GPU, their number would have to be waited for.

Axes: `N` tokens of the row, `A` actions of the row, `U` actions of its unequal completions, `V` visual tokens, `M`
tokens that predict an action.
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
    completions of 5 and 3 tokens makes a row of 30 + 4 + 2 tokens and 8 actions. Equal completions of a prompt are in
    it once (`train.equal_samples`): with a second one of the same 5 tokens it has 13 actions, 8 of them to compute.
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
    """Index of each action of all completions among those of the unequal ones."""
    visual_index_V: Tensor
    """Index in the row of each visual token."""
    predictor_index_M: Tensor
    """The distinct values of `hidden_index_U`, ascending."""
    predictor_U: Tensor
    """Index of each value of `hidden_index_U` among them."""
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
