"""A value function with a model of its own.

Axes: `A` actions of a row.
"""

from __future__ import annotations

from torch import Tensor, nn

from fovea.models.shared_prefix.packed_row import PackedRow
from fovea.models.value_head import ValueHead
from fovea.models.vlm import VLM


class ValueModel(nn.Module):
    """The trunk of a VLM, and a head for values in place of the one for tokens."""

    def __init__(self, trunk: VLM) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ValueHead(trunk.text_config.hidden_size, detach_trunk=False)

    def forward(self, row: PackedRow) -> Tensor:
        """Values [A] before each action of the row."""
        values_A: Tensor = self.head(self.trunk.action_states(row))
        return values_A
