"""Value head: predicts the return from the hidden state before each action.

Axes: `A` actions, `E` width of the model.
"""

from __future__ import annotations

from torch import Tensor, nn


class ValueHead(nn.Module):
    """A float32 linear layer on the hidden states that predict the actions, initialised to 0."""

    def __init__(self, width: int, *, detach_trunk: bool) -> None:
        """With `detach_trunk` the value loss trains this layer only."""
        super().__init__()
        self._detach_trunk = detach_trunk
        self.linear = nn.Linear(width, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_AE: Tensor) -> Tensor:
        """Values [A]."""
        states_AE = hidden_AE.detach() if self._detach_trunk else hidden_AE
        values_A1: Tensor = self.linear(states_AE.float())
        # a copy, not a view: FSDP2 registers its backward hook on the tensor that a module returns
        return values_A1[:, 0].clone()
