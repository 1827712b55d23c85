"""Mixture-of-experts MLP: a router sends each token to its k best experts, each of which is a gated MLP.

It computes the same as transformers' Qwen3VLMoeTextSparseMoeBlock, or with a shared expert the same as
Qwen3_5MoeSparseMoeBlock or Glm4vMoeTextMoE; tests compare them.

Axes: `N` tokens, `E` width of the model, `X` experts, `K` experts of a token, `S` = N K (token,
expert) pairs sorted by expert, `F` width of an expert, `G` = 2 F.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fovea.errors import ModelError
from fovea.models.decoder import ExpertGroups, LayerCall, Linears
from fovea.models.kernels import Gate

SYNC_FREE_MAJORS = (9, 10)
"""Compute capabilities of GPUs on which torch's grouped product in bfloat16 needs no sync with the host
(`_grouped_mm_cuda` in torch's aten/src/ATen/native/cuda/GroupedBlas.cpp, at least up to torch 2.10)."""

ROW_BYTES = 16
"""Alignment that a grouped product requires of the rows of both factors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """A gated MLP that all tokens run through in addition to their experts; Qwen weights it by a sigmoid per token."""

    inputs: Linears
    """Projections to gate, to up and, if the expert is weighted, to the logit of its weight [N, 1]."""
    down: Linears

    def __call__(self, x_NE: Tensor, call: LayerCall) -> Tensor:
        gate_NF, up_NF, *logit_N1 = self.inputs(x_NE)
        (out_NE,) = self.down(call.kernels.gate(gate_NF, up_NF, None))
        return logit_N1[0].sigmoid() * out_NE if logit_N1 else out_NE


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture-of-experts layer: the weights of a router and of its experts."""

    router_XE: Tensor
    gate_up_XGE: Tensor
    down_XEF: Tensor
    per_token: int
    """Number K of experts that each token runs through."""
    shared: SharedExpert | None = None
    bias_X: Tensor | None = None
    """Bias that GLM adds to the scores when it chooses experts, but not to the experts' weights; None in Qwen."""

    def __post_init__(self) -> None:
        _, width, expert_width = self.down_XEF.shape
        if any(size * self.down_XEF.element_size() % ROW_BYTES for size in (width, expert_width)):
            raise ModelError(
                f"experts with hidden_size={width} and moe_intermediate_size={expert_width} in {self.down_XEF.dtype}: "
                f"torch's grouped product only takes rows of a multiple of {ROW_BYTES} bytes; choose another model"
            )

    def __call__(self, x_NE: Tensor, call: LayerCall) -> Tensor:
        """Outputs [N, E]: the weighted sum of each token's experts, including the shared expert."""
        weight_NK, expert_NK = self._route(x_NE, call)
        if call.expert_load is not None:
            call.expert_load.add(call.index, expert_NK, len(self.router_XE))
        run = self.run_all if _needs_fixed_shapes(x_NE) else self.run_grouped
        out_NE = run(x_NE, weight_NK, expert_NK, call.kernels.gate)
        return out_NE if self.shared is None else out_NE + self.shared(x_NE, call)

    def _route(self, x_NE: Tensor, call: LayerCall) -> tuple[Tensor, Tensor]:
        if self.bias_X is None:
            return route(x_NE, self.router_XE, self.per_token)
        assert call.shape.groups is not None, "an expert bias without expert groups"
        return route_in_groups(x_NE, self.router_XE, self.bias_X, self.per_token, call.shape.groups)

    def run_grouped(self, x_NE: Tensor, weight_NK: Tensor, expert_NK: Tensor, gate: Gate) -> Tensor:
        """Run each expert only on its own tokens, which are sorted by expert."""
        expert_S, order_S = expert_NK.flatten().sort(stable=True)
        end_X = torch.searchsorted(
            expert_S, torch.arange(len(self.router_XE), device=x_NE.device), right=True, out_int32=True
        )
        gate_up_SG = F.grouped_mm(x_NE[order_S // self.per_token], self.gate_up_XGE.mT, offs=end_X)
        # apply the weights before the last product, which is linear: its outputs need not be kept for the backward pass
        gate_part, up_part = gate_up_SG.chunk(2, -1)
        hidden_SF = gate(gate_part, up_part) * weight_NK.flatten()[order_S, None]
        out_SE = F.grouped_mm(hidden_SF, self.down_XEF.mT, offs=end_X)
        # gather and sum, since index_add is not deterministic on CUDA
        out_NKE: Tensor = out_SE[order_S.argsort()].unflatten(0, (-1, self.per_token))
        return out_NKE.sum(1)

    def run_all(self, x_NE: Tensor, weight_NK: Tensor, expert_NK: Tensor, gate: Gate) -> Tensor:
        """Run every expert on all tokens, with weight 0 where it was not chosen, so that shapes depend only on N."""
        weight_NX = weight_NK.new_zeros(len(x_NE), len(self.router_XE)).scatter(1, expert_NK, weight_NK)
        gate_up_NXG = torch.einsum("ne,xge->nxg", x_NE, self.gate_up_XGE)
        gate_part, up_part = gate_up_NXG.chunk(2, -1)
        hidden_NXF = gate(gate_part, up_part) * weight_NX[..., None]
        return torch.einsum("nxf,xef->ne", hidden_NXF, self.down_XEF)


def route(x_NE: Tensor, router_XE: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
    """Weights and indices [N, K] of each token's experts: the K largest probabilities, rescaled to sum to 1."""
    probability_NX = F.linear(x_NE, router_XE).softmax(-1, dtype=torch.float32)
    weight_NK, expert_NK = probability_NX.topk(per_token)
    return (weight_NK / weight_NK.sum(-1, keepdim=True)).to(x_NE.dtype), expert_NK


def route_in_groups(
    x_NE: Tensor, router_XE: Tensor, bias_X: Tensor, per_token: int, groups: ExpertGroups
) -> tuple[Tensor, Tensor]:
    """Weights and indices [N, K] of each token's experts, by sigmoid scores, as transformers' Glm4vMoeTextTopkRouter.

    Experts are chosen from the groups with the largest sums of their two best scores.
    """
    score_NX = F.linear(x_NE.float(), router_XE.float()).sigmoid()
    choice_NGX = (score_NX + bias_X).unflatten(-1, (groups.count, -1))
    group_NG = choice_NGX.topk(2).values.sum(-1).topk(groups.per_token).indices
    chosen_NG = torch.zeros_like(choice_NGX[..., 0], dtype=torch.bool).scatter(1, group_NG, value=True)
    expert_NK = choice_NGX.masked_fill(~chosen_NG[..., None], -torch.inf).flatten(1).topk(per_token).indices
    weight_NK = score_NX.gather(1, expert_NK)
    if groups.normed:
        weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
    return (weight_NK * groups.scale).to(x_NE.dtype), expert_NK


def _needs_fixed_shapes(x: Tensor) -> bool:
    """True while a CUDA graph is being captured, if torch's grouped product would copy group sizes to the host."""
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return False
    sync_free = torch.cuda.get_device_capability(x.device)[0] in SYNC_FREE_MAJORS
    return x.dtype != torch.bfloat16 or not sync_free
