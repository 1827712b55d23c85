"""Gated delta net, which replaces attention in most decoder layers of Qwen3.5.

It computes the same as transformers' Qwen3_5GatedDeltaNet; tests compare them.

Axes: `N` tokens, `E` width of the model, `C`, `K`, `V` and `F` as in `models.delta_rule`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fovea.models.decoder import LayerCall, Linears
from fovea.models.delta_rule import DeltaInputs
from fovea.models.kernels import rms_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """A gated delta-net layer and its weights."""

    inputs: Linears
    """Projections to queries, keys and values (concatenated), to the output gate, to beta and to the decay."""
    output: Linears
    conv_C1K: Tensor
    log_rate_V: Tensor
    """transformers' `A_log`."""
    decay_bias_V: Tensor
    """transformers' `dt_bias`."""
    norm_F: Tensor

    def __call__(self, x_NE: Tensor, call: LayerCall) -> Tensor:
        """Outputs [N, E], only for the wanted tokens if the call names any."""
        assert call.scan is not None, "a pass over delta nets without their states"
        mixed_NC, gate, beta_NV, decay_NV = self.inputs(x_NE)
        # in float32: in 16 bits the rate may overflow
        log_decay_NV = -self.log_rate_V.float().exp() * F.softplus(decay_NV.float() + self.decay_bias_V)
        inputs = DeltaInputs(
            mixed=mixed_NC, log_decay=log_decay_NV, beta=beta_NV.sigmoid(), conv_CK=self.conv_C1K.squeeze(1)
        )
        out_NVF = call.scan(call.index, inputs)
        if call.wanted is not None:
            out_NVF, gate = out_NVF.index_select(0, call.wanted), gate.index_select(0, call.wanted)
        normed_NVF = rms_norm(out_NVF, self.norm_F, call.shape.norm_eps)
        gated_NVF = (normed_NVF * F.silu(gate.float()).view_as(normed_NVF)).to(out_NVF.dtype)
        (out_NE,) = self.output(gated_NVF.flatten(1))
        return out_NE
