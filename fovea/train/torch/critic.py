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
    """A head on the policy's trunk (`model` is None), or a model of its own."""

    optimizer: Optimizer
    model: ValueModel | None
    warmup_steps: int
    """First updates of the run in which the policy waits for the values to mean something."""

    def snapshot_reference(self, policy: PolicyNetwork) -> None:
        """A model of its own begins as a copy of the policy, as a warm-up has left that."""
        if self.model is not None:
            # the policy's linear layers and norms; the head for values is not among them
            copy_weights(dict(policy.named_parameters()), dict(self.model.trunk.named_parameters()))
        self.optimizer.sync_from_model()

    def train(self, mode: bool) -> None:
        """As `nn.Module.train`: layers recompute their activations in training only."""
        if self.model is not None:
            self.model.train(mode)


def value_terms(values_A: Tensor, micro: MicroBatch, algorithm: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
    """The value loss of a micro-batch, weighed as the policy's, and sums for the metrics."""
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
    """The trunk of a PolicyNetwork, and a head for values in place of the one for tokens."""

    def __init__(self, trunk: PolicyNetwork) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ValueHead(trunk.text_config.hidden_size, detach_trunk=False)

    def forward(self, row: PackedRow) -> Tensor:
        """Values [A] before each action of the row."""
        values_A: Tensor = self.head(self.trunk.action_states(row))
        return values_A
