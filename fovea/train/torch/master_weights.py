"""Float32 copies of weights that are kept in a shorter type.

A step of AdamW at 1e-6 is smaller than half a unit in the last place of nearly every bfloat16 weight: added to the
weight itself it would be rounded away, and the run would learn nothing, in silence. Micikevicius et al., arXiv
1710.03740, section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class MasterWeights:
    """What the optimizer steps on: the parameter itself where it is float32, a float32 copy elsewhere."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self.by_name: dict[str, Tensor] = {
            name: parameter if parameter.dtype == torch.float32 else parameter.detach().float()
            for name, parameter in parameters.items()
        }

    @torch.no_grad()
    def read_again(self) -> None:
        """Somebody else has trained the model: follow its weights."""
        for parameter, master in self._copied():
            master.copy_(parameter)

    def take_gradients(self) -> None:
        """Before the optimizer's step: hand each gradient over in float32."""
        for parameter, master in self._copied():
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """After the step, or after loading: round the copies into the model."""
        for parameter, master in self._copied():
            parameter.copy_(master)

    def _copied(self) -> list[tuple[nn.Parameter, Tensor]]:
        pairs = ((self._parameters[name], master) for name, master in self.by_name.items())
        return [(parameter, master) for parameter, master in pairs if parameter is not master]
