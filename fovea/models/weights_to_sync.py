"""Weights of a network for a weight sync, computed one at a time, with adapters merged or separate."""

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
    """A weight to send, under its Hugging Face name."""

    name: str
    parameter: Tensor
    """The parameter; a DTensor if it is sharded."""
    adapter: LoraLayer | None = None
    """The adapter to merge into the weight."""
    is_turned: bool = False
    """True if Hub files store the axes of this weight in another order."""

    @property
    def is_trained(self) -> bool:
        """True if training changes the weight."""
        return self.parameter.requires_grad or self.adapter is not None

    @property
    def shape(self) -> Shape:
        return tuple(self.parameter.shape)

    def tensor(self) -> Tensor:
        """Return the weight with its adapter merged, sharded like the parameter."""
        return merged(self.parameter, self.adapter)


def weights_to_sync(network: nn.Module) -> Iterator[WeightToSync]:
    """Yield every parameter unchanged, with adapters separate from the base weights (`trainable.factored_weights`)."""
    kind = config_of(network).model_type
    return (
        WeightToSync(name=name, parameter=parameter, is_turned=is_turned(name, kind))
        for name, parameter in factored_weights(network)
    )


def merged_weights_to_sync(network: nn.Module) -> Iterator[WeightToSync]:
    """Yield every weight of the base model, with its adapter merged into it (`trainable.merged_weights`)."""
    kind = config_of(network).model_type
    return (
        WeightToSync(name=name, parameter=parameter, adapter=adapter, is_turned=is_turned(name, kind))
        for name, parameter, adapter in adapted_weights(network)
    )


def in_layout_of_files(weights: Iterable[WeightToSync]) -> Iterator[WeightToSync]:
    """Yield the same weights in the layout of Hub files, which engines of other packages load."""
    return (_turned(weight) if weight.is_turned else weight for weight in weights)


def _turned(weight: WeightToSync) -> WeightToSync:
    # detached, since a view of a trained weight would have a gradient function
    view = in_hub_layout(weight.parameter.detach())
    return replace(weight, parameter=view.requires_grad_(weight.is_trained))
