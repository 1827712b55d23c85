"""The value function of PPO and its optimizer, beside the policy's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fovea.algorithms.value_loss import value_loss
from fovea.config.run import Algorithm
from fovea.models.policy_network import PolicyNetwork
from fovea.models.shared_prefix.packed_row import PackedRow
from fovea.models.value_head import ValueHead
from fovea.train.packing import MicroBatch
from fovea.train.torch.optimizer import Optimizer
from fovea.train.torch.sharding import copy_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """Value function of PPO: a head on the policy's trunk (`model` is None), or a separate model."""

    optimizer: Optimizer
    model: ValueModel | None
    warmup_steps: int
    """Number of updates at the start of the run that train the value function only."""

    def snapshot_reference(self, policy: PolicyNetwork) -> None:
        """Copy the policy's weights into the trunk of a separate model, and all weights into the optimizer's."""
        if self.model is not None:
            # the trunk only: the policy has no weights for the value head
            copy_weights(dict(policy.named_parameters()), dict(self.model.trunk.named_parameters()))
        self.optimizer.sync_from_model()

    def train(self, mode: bool) -> None:
        """Set the training mode of a separate model (`nn.Module.train`), which turns on gradient checkpointing."""
        if self.model is not None:
            self.model.train(mode)


def value_terms(values_A: Tensor, micro: MicroBatch, algorithm: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
    """Value loss of a micro-batch, weighted by `micro.weights_A` as the policy loss is, and sums for the metrics."""
    settings = algorithm.critic
    assert settings is not None, "a value loss needs a value function (algorithm.advantage=gae)"
    assert micro.values_A is not None, "it needs the values from before the update"
    assert micro.returns_A is not None, "and the returns"
    terms = value_loss(values_A, micro.values_A, micro.returns_A, clip=settings.value_clip)
    loss = (micro.weights_A * terms.loss_A).sum()
    return settings.value_coef * loss, {
        "value_loss": terms.loss_A.detach().sum(),
        "value_clip_frac": terms.clipped_A.sum(),
    }


class ValueModel(nn.Module):
    """A PolicyNetwork's trunk with a value head in place of the language-model head."""

    def __init__(self, trunk: PolicyNetwork) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ValueHead(trunk.text_config.hidden_size, detach_trunk=False)

    def forward(self, row: PackedRow) -> Tensor:
        """Values [A] of the states before each action."""
        values_A: Tensor = self.head(self.trunk.action_states(row))
        return values_A
