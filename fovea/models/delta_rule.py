"""The gated delta rule (Yang et al., arXiv 2412.06464) of rows of tokens that go on from states.

A row's state takes the place of its keys and values, and has one size however long the row is. Rows are those of a
batch, so that no state crosses the border of a row. The functions that compute it are transformers' own: kernels of
flash-linear-attention and causal-conv1d where these are installed, else plain torch.

Axes: `N` tokens, `R` rows, `T` tokens of the longest row, `C` channels of the convolution (queries, keys and values of
all heads), `K` its window, `V` value heads, `D` width of a key, `F` width of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor

from fovea.models.shared_prefix.layout import SharedPrefixLayout
from fovea.models.transformers_versions import DeltaFunctions, delta_functions

KERNELS = {"flash-linear-attention": "fla", "causal-conv1d": "causal_conv1d"}
"""Packages whose kernels transformers runs on CUDA, with the module of each; not tested with Fovea yet."""

CHUNK = 64
"""Most tokens of a chunk in plain torch, transformers' default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Sizes of the delta nets of a decoder whose other layers have attention."""

    is_delta: tuple[bool, ...]
    """True for each layer that is a delta net."""
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    window: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    def state_bytes(self, width: int) -> int:
        """Bytes of the states of a row in all layers; `width` is the bytes of an activation."""
        memory = self.value_heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return sum(self.is_delta) * (memory + (self.window - 1) * sum(self.widths) * width)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaInputs:
    """Inputs of the rule: of the tokens of a pass, [N, ...], or of rows, [R, T, ...]."""

    mixed: Tensor
    """Queries, keys and values side by side, before the convolution."""
    log_decay: Tensor
    """Log of the factor on the state before each token, by value head; float32."""
    beta: Tensor
    """Share of its old value that a key's new one replaces, by value head."""
    conv_CK: Tensor
    lengths_R: Tensor | None = None
    """Tokens of each row; None if all have T."""

    def rows(self, index_RT: Tensor, valid_RT: Tensor) -> DeltaInputs:
        """The inputs as rows of tokens gathered by index; padding follows the tokens and leaves the state as it is."""
        padding_RT1 = ~valid_RT[..., None]
        return replace(
            self,
            mixed=_gather(self.mixed, index_RT),
            log_decay=_gather(self.log_decay, index_RT).masked_fill(padding_RT1, 0),
            beta=_gather(self.beta, index_RT).masked_fill(padding_RT1, 0),
            lengths_R=valid_RT.sum(1),
        )

    def steps(self) -> DeltaInputs:
        """The inputs as rows of one token each."""
        return replace(self, mixed=self.mixed[:, None], log_decay=self.log_decay[:, None], beta=self.beta[:, None])


@dataclass(frozen=True, slots=True)
class DeltaState:
    """States of rows in one layer."""

    tail_RKC: Tensor
    """The last K - 1 inputs of the convolution; zeros before the first token."""
    memory_RVDF: Tensor
    """float32."""

    @staticmethod
    def zeros(rows: int, shape: DeltaShape, like: Tensor) -> DeltaState:
        """States of rows without a token, on the device of `like` and with tails of its type."""
        return DeltaState(
            like.new_zeros(rows, shape.window - 1, sum(shape.widths)),
            like.new_zeros(rows, shape.value_heads, shape.key_dim, shape.value_dim, dtype=torch.float32),
        )

    def select(self, index: Tensor) -> DeltaState:
        """Copies of the states of these rows, each of which may branch from one row."""
        return DeltaState(self.tail_RKC.index_select(0, index), self.memory_RVDF.index_select(0, index))

    @staticmethod
    def cat(states: Sequence[DeltaState]) -> DeltaState:
        """The states of all rows of several batches."""
        return DeltaState(
            torch.cat([each.tail_RKC for each in states]), torch.cat([each.memory_RVDF for each in states])
        )


Scan = Callable[[int, DeltaInputs], Tensor]
"""(layer, inputs [N, ...]) -> [N, V, F]"""


def delta_rule(
    rows: DeltaInputs, before: DeltaState, shape: DeltaShape, functions: DeltaFunctions | None = None
) -> tuple[Tensor, DeltaState]:
    """Outputs [R, T, V, F] of rows, and their states after the last token of each; default: the fastest functions."""
    functions, tokens = functions or delta_functions(), rows.mixed.shape[1]
    inputs_RTC = torch.cat([before.tail_RKC, rows.mixed], dim=1)
    # with the tail in front, as many outputs fewer belong to these tokens
    mixed_RCT = functions.convolve(inputs_RTC.transpose(1, 2), rows.conv_CK, None, activation="silu")[..., -tokens:]
    query, key, value = mixed_RCT.transpose(1, 2).split(shape.widths, dim=-1)
    times = shape.value_heads // shape.key_heads
    heads = [x.unflatten(-1, (shape.key_heads, -1)).repeat_interleave(times, 2) for x in (query, key)]
    # flash-linear-attention has no backward pass for single tokens
    rule = functions.step if tokens == 1 and not torch.is_grad_enabled() else functions.chunks
    # plain torch pads rows to whole chunks, and solves a triangular system for each; kernels on CUDA choose the size
    sizes = {} if rows.mixed.is_cuda or rule is functions.step else {"chunk_size": min(tokens, CHUNK)}
    out_RTVF, memory_RVDF = rule(
        *heads,
        value.unflatten(-1, (shape.value_heads, -1)),
        g=rows.log_decay,
        beta=rows.beta,
        initial_state=before.memory_RVDF,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        **sizes,
    )
    return out_RTVF, DeltaState(_tail(inputs_RTC, rows.lengths_R, shape.window - 1), memory_RVDF)


def _tail(inputs_RTC: Tensor, lengths_R: Tensor | None, size: int) -> Tensor:
    """The last inputs of each row, whose length is counted without the `size` inputs in front."""
    if lengths_R is None:
        return inputs_RTC[:, inputs_RTC.shape[1] - size :]
    index_RK = lengths_R[:, None] + torch.arange(size, device=lengths_R.device)
    return inputs_RTC.gather(1, index_RK[..., None].expand(-1, -1, inputs_RTC.shape[2]))


def row_scan(layout: SharedPrefixLayout, shape: DeltaShape) -> Scan:
    """The rule over a packed row: prompts from empty states, completions from the state after their prompt.

    The state of a prompt receives gradients from all of its completions.
    """
    prompts, group = layout.completion_index_PGT.shape[:2]
    prompt_of_R = torch.arange(prompts, device=layout.prompt_index_PL.device).repeat_interleave(group)

    def scan(_layer: int, inputs: DeltaInputs) -> Tensor:
        empty = DeltaState.zeros(prompts, shape, inputs.mixed)
        out_PLVF, states = delta_rule(inputs.rows(layout.prompt_index_PL, layout.prompt_valid_PL), empty, shape)
        blocks = [out_PLVF.flatten(0, 1)]
        if layout.has_completions:
            index_RT, valid_RT = (x.flatten(0, 1) for x in (layout.completion_index_PGT, layout.completion_valid_PGT))
            out_RTVF, _ = delta_rule(inputs.rows(index_RT, valid_RT), states.select(prompt_of_R), shape)
            blocks.append(out_RTVF.flatten(0, 1))
        return torch.cat(blocks)[layout.return_index_N]

    return scan


def slow_delta_note(device: torch.device) -> str | None:
    """Note for the start of a run on a GPU without the kernels of delta nets, else None."""
    missing = [package for package, module in KERNELS.items() if find_spec(module) is None]
    if device.type == "cpu" or not missing:
        return None
    names = " ".join(missing)
    return f"delta nets: plain torch functions run, many times slower than their kernels; pip install {names}"


def _gather(x_NX: Tensor, index_RT: Tensor) -> Tensor:
    rows: Tensor = x_NX.index_select(0, index_RT.flatten()).unflatten(0, tuple(index_RT.shape))
    return rows
