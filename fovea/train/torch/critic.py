"""The value function of PPO and its optimizer, beside the policy's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fovea.models.heads import ValueHead
from fovea.models.policy_network import PolicyNetwork
from fovea.models.shared_prefix.layout import PackedRow
from fovea.train.torch.optimizer import Optimizer
from fovea.train.torch.sharding import copy_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFunction:
    """Value function of PPO: a head on the policy's trunk (`model` is None), or a separate model."""

    optimizer: Optimizer
    model: ValueModel | None

    def snapshot_reference(self, policy: PolicyNetwork) -> None:
        """Copy the policy's weights into the trunk of a separate model, and all weights into the optimizer's."""
        if self.model is not None:
            # the trunk only: the policy has no weights for the value head
            copy_weights(dict(policy.named_parameters()), dict(self.model.trunk.named_parameters()))
        self.optimizer.masters.sync_from_model()


class ValueModel(nn.Module):
    """A PolicyNetwork's trunk with a value head in place of the language-model head."""

    def __init__(self, trunk: PolicyNetwork) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ValueHead(trunk.text_config.hidden_size, detach_trunk=False)

    def forward(self, row: PackedRow) -> Tensor:
        """Values [A] of the states before each action."""
        values_U: Tensor = self.head(self.trunk.action_states(row))
        return values_U[row.computed_A]
