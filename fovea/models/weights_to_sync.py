"""Weights of a network as a weight sync sends them: each is made when its turn comes, with its adapter merged or beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from fovea.models.load import in_hub_layout
from fovea.models.modules import config_of
from fovea.models.trainable import adapted_weights, factored_weights, merged
from fovea.models.transformers_versions import is_turned
from fovea.types import Shape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightToSync:
    """A weight under its Hugging Face name."""

    name: str
    parameter: Tensor
    """A DTensor where it is sharded."""
    adapter: LoraLayer | None = None
    """The adapter that is merged into it."""
    is_turned: bool = False
    """True if files of the hub hold its axes in another order."""

    @property
    def is_trained(self) -> bool:
        """True if training changes it."""
        return self.parameter.requires_grad or self.adapter is not None

    @property
    def shape(self) -> Shape:
        return tuple(self.parameter.shape)

    def tensor(self) -> Tensor:
        """The weight, its adapter merged; sharded as the parameter is."""
        return merged(self.parameter, self.adapter)


def weights_to_sync(network: nn.Module) -> Iterator[WeightToSync]:
    """Every parameter as it is, adapters beside the weights that they add to (`trainable.factored_weights`)."""
    kind = config_of(network).model_type
    return (
        WeightToSync(name=name, parameter=parameter, is_turned=is_turned(name, kind))
        for name, parameter in factored_weights(network)
    )


def merged_weights_to_sync(network: nn.Module) -> Iterator[WeightToSync]:
    """Every weight of the model without adapters, each with its adapter merged (`trainable.merged_weights`)."""
    kind = config_of(network).model_type
    return (
        WeightToSync(name=name, parameter=parameter, adapter=adapter, is_turned=is_turned(name, kind))
        for name, parameter, adapter in adapted_weights(network)
    )


def in_layout_of_files(weights: Iterable[WeightToSync]) -> Iterator[WeightToSync]:
    """The same weights as files of the hub hold them, for engines of other packages, which load those."""
    return (_turned(weight) if weight.is_turned else weight for weight in weights)


def _turned(weight: WeightToSync) -> WeightToSync:
    # detached, since a view of a weight under training has a gradient function
    view = in_hub_layout(weight.parameter.detach())
    return replace(weight, parameter=view.requires_grad_(weight.is_trained))
