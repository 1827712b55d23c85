"""A value function on top of a policy: what reward may still be expected before each action.

Axes: `A` actions, `E` width of the model.
"""

from __future__ import annotations

from torch import Tensor, nn


class ValueHead(nn.Module):
    """One linear layer on the hidden state that predicts the action, in float32; it begins at 0 everywhere."""

    def __init__(self, width: int, *, detach_trunk: bool) -> None:
        """`detach_trunk`: the value loss trains this layer and nothing below it."""
        super().__init__()
        self._detach_trunk = detach_trunk
        self.linear = nn.Linear(width, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_AE: Tensor) -> Tensor:
        """Values [A]."""
        states_AE = hidden_AE.detach() if self._detach_trunk else hidden_AE
        values_A1: Tensor = self.linear(states_AE.float())
        # not a view: sharded modules hang their backward pass on the tensor that they return
        return values_A1[:, 0].clone()
