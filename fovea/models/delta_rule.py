"""The gated delta rule (Yang et al., arXiv 2412.06464) for rows of tokens that continue from given states.

A row's state replaces its keys and values, and its size does not depend on the length of the row. Rows form a batch, so
no state leaks from one row into another. The functions that compute the rule are transformers' own: the kernels of
flash-linear-attention and causal-conv1d if these are installed and pass a trial, else plain torch.

Axes: `N` tokens, `R` rows, `T` tokens of the longest row, `C` channels of the convolution (queries, keys and values of
all heads), `K` its window, `V` value heads, `D` width of a key, `F` width of a value.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor

from fovea.models.shared_prefix.layout import SharedPrefixLayout
from fovea.models.transformers_versions import DeltaFunctions, delta_functions, plain_delta_functions
from fovea.models.trials import Tensors, first_difference, random_tensor, values_and_gradients, why_refused

KERNELS = {"flash-linear-attention": "fla", "causal-conv1d": "causal_conv1d"}
"""Packages whose kernels transformers uses, with the module of each. A run compares the kernels with plain torch before
it uses them; they have not been tested on a GPU yet."""
PACKAGES = {"convolve": "causal-conv1d", "chunks": "flash-linear-attention", "step": "flash-linear-attention"}
"""The package that provides the kernel for each function of `DeltaFunctions`."""
TRIALS = ((5, 1), (3, 3), (2, 64), (2, 130))
"""Rows and tokens of each trial: a decode step, fewer tokens than the window, one chunk, and more than two chunks."""
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest norm of a difference, relative to the norm of the values. float32 kernels multiply in TF32 (10 bits)."""

CHUNK = 64
"""Largest number of tokens in a chunk in plain torch: transformers' default."""
GRID_LIMIT = 65_535
"""Largest product of rows and value heads in a call: the limit of the second axis of a CUDA grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Sizes of the delta nets of a decoder; its other layers have attention."""

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
        """Bytes of one row's states in all layers; `width` is the number of bytes of one activation."""
        memory = self.value_heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return sum(self.is_delta) * (memory + (self.window - 1) * sum(self.widths) * width)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaInputs:
    """Inputs of the rule, either for the tokens of a pass, [N, ...], or for padded rows, [R, T, ...]."""

    mixed: Tensor
    """Queries, keys and values, concatenated, before the convolution."""
    log_decay: Tensor
    """Log of the decay that is applied to the state before each token, per value head; float32."""
    beta: Tensor
    """Fraction of a key's old value that the new value replaces, per value head."""
    conv_CK: Tensor
    lengths_R: Tensor | None = None
    """Number of tokens in each row; None if all rows have T."""

    def rows(self, index_RT: Tensor, valid_RT: Tensor) -> DeltaInputs:
        """The inputs gathered by index into padded rows; padding follows the tokens and leaves the state unchanged."""
        padding_RT1 = ~valid_RT[..., None]
        return replace(
            self,
            mixed=_gather(self.mixed, index_RT),
            log_decay=_gather(self.log_decay, index_RT).masked_fill(padding_RT1, 0),
            beta=_gather(self.beta, index_RT).masked_fill(padding_RT1, 0),
            lengths_R=valid_RT.sum(1),
        )

    def split(self, size: int) -> list[DeltaInputs]:
        """Split the inputs into parts of `size` rows each."""
        lengths = None if self.lengths_R is None else self.lengths_R.split(size)
        return [
            replace(
                self, mixed=mixed, log_decay=decay, beta=beta, lengths_R=None if lengths is None else lengths[index]
            )
            for index, (mixed, decay, beta) in enumerate(
                zip(*(x.split(size) for x in (self.mixed, self.log_decay, self.beta)), strict=True)
            )
        ]

    def steps(self) -> DeltaInputs:
        """The inputs as rows of one token each."""
        return replace(self, mixed=self.mixed[:, None], log_decay=self.log_decay[:, None], beta=self.beta[:, None])


@dataclass(frozen=True, slots=True)
class DeltaState:
    """States of a batch of rows in one layer."""

    tail_RKC: Tensor
    """The last K - 1 inputs of the convolution; zeros before the first token."""
    memory_RVDF: Tensor
    """The recurrent state of each value head; float32."""

    @staticmethod
    def zeros(rows: int, shape: DeltaShape, like: Tensor) -> DeltaState:
        """Initial states of rows, on the device of `like`; the tails have its dtype."""
        return DeltaState(
            like.new_zeros(rows, shape.window - 1, sum(shape.widths)),
            like.new_zeros(rows, shape.value_heads, shape.key_dim, shape.value_dim, dtype=torch.float32),
        )

    def select(self, index: Tensor) -> DeltaState:
        """Copies of the states at these indices; an index may repeat, so that several rows branch from one."""
        return DeltaState(self.tail_RKC.index_select(0, index), self.memory_RVDF.index_select(0, index))

    def split(self, size: int) -> list[DeltaState]:
        """Split the states into parts of `size` rows each."""
        return [DeltaState(*part) for part in zip(self.tail_RKC.split(size), self.memory_RVDF.split(size), strict=True)]

    @staticmethod
    def cat(states: Sequence[DeltaState]) -> DeltaState:
        """Concatenate the states of several batches of rows."""
        return DeltaState(
            torch.cat([each.tail_RKC for each in states]), torch.cat([each.memory_RVDF for each in states])
        )


Scan = Callable[[int, DeltaInputs], Tensor]
"""(layer, inputs [N, ...]) -> [N, V, F]"""


def delta_rule(
    rows: DeltaInputs, before: DeltaState, shape: DeltaShape, functions: DeltaFunctions
) -> tuple[Tensor, DeltaState]:
    """Outputs [R, T, V, F] of the rows, and the state of each row after its last token."""
    most = max(1, GRID_LIMIT // shape.value_heads)
    if len(rows.mixed) > most:
        parts = [delta_rule(*part, shape, functions) for part in zip(rows.split(most), before.split(most), strict=True)]
        outs, states = zip(*parts, strict=True)
        return torch.cat(outs), DeltaState.cat(states)
    tokens = rows.mixed.shape[1]
    inputs_RTC = torch.cat([before.tail_RKC, rows.mixed], dim=1)
    # the tail comes first, so only the last outputs belong to these tokens
    mixed_RCT = functions.convolve(inputs_RTC.transpose(1, 2), rows.conv_CK, None, activation="silu")[..., -tokens:]
    query, key, value = mixed_RCT.transpose(1, 2).split(shape.widths, dim=-1)
    times = shape.value_heads // shape.key_heads
    heads = [x.unflatten(-1, (shape.key_heads, -1)).repeat_interleave(times, 2) for x in (query, key)]
    # flash-linear-attention has no backward pass for single tokens
    rule = functions.step if tokens == 1 and not torch.is_grad_enabled() else functions.chunks
    # plain torch pads rows to whole chunks and solves a triangular system per chunk; CUDA kernels choose the chunk size
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
    """The last `size` inputs of each row; `lengths_R` does not count the `size` inputs of the previous tail."""
    if lengths_R is None:
        return inputs_RTC[:, inputs_RTC.shape[1] - size :]
    index_RK = lengths_R[:, None] + torch.arange(size, device=lengths_R.device)
    return inputs_RTC.gather(1, index_RK[..., None].expand(-1, -1, inputs_RTC.shape[2]))


def row_scan(layout: SharedPrefixLayout, shape: DeltaShape, like: Tensor) -> Scan:
    """The rule over a packed row: prompts start from empty states, completions from the state after their prompt.

    The state of a prompt receives gradients from all of its completions. `like` has the activations' dtype and device.
    """
    # chosen here, since a trial inside a checkpointed layer would be recorded as part of that layer
    functions = fastest_functions(shape, like.device, like.dtype)
    prompts, group = layout.completion_index_PGT.shape[:2]
    prompt_of_R = torch.arange(prompts, device=layout.prompt_index_PL.device).repeat_interleave(group)

    def scan(_layer: int, inputs: DeltaInputs) -> Tensor:
        empty = DeltaState.zeros(prompts, shape, inputs.mixed)
        out_PLVF, states = delta_rule(
            inputs.rows(layout.prompt_index_PL, layout.prompt_valid_PL), empty, shape, functions
        )
        blocks = [out_PLVF.flatten(0, 1)]
        if layout.has_completions:
            index_RT, valid_RT = (x.flatten(0, 1) for x in (layout.completion_index_PGT, layout.completion_valid_PGT))
            out_RTVF, _ = delta_rule(inputs.rows(index_RT, valid_RT), states.select(prompt_of_R), shape, functions)
            blocks.append(out_RTVF.flatten(0, 1))
        return torch.cat(blocks)[layout.return_index_N]

    return scan


def fastest_functions(shape: DeltaShape, device: torch.device, dtype: torch.dtype) -> DeltaFunctions:
    """The functions that transformers picked for this machine, with plain ones in place of any that failed a trial."""
    plain = plain_delta_functions()
    refused = {name: getattr(plain, name) for name in delta_refusals(delta_functions(), shape, device, dtype)}
    return replace(delta_functions(), **refused)


@lru_cache(maxsize=64)
def delta_refusals(
    picked: DeltaFunctions, shape: DeltaShape, device: torch.device, dtype: torch.dtype
) -> Mapping[str, str]:
    """Names of the functions that cannot be used for nets of this shape, each with the reason.

    Only functions whose package is installed are tried; in each trial the other two functions are plain ones.
    """
    tried = {
        name: why_refused(partial(delta_difference, name, picked, shape, device, dtype))
        for name, package in PACKAGES.items()
        if find_spec(KERNELS[package]) is not None
    }
    return {name: refusal for name, refusal in tried.items() if refusal is not None}


def delta_difference(
    name: str, picked: DeltaFunctions, shape: DeltaShape, device: torch.device, dtype: torch.dtype
) -> str | None:
    """How a picked function differs from the plain one on random rows with initial states; None if it does not."""
    # raises if the package cannot be imported; transformers would silently fall back to plain functions
    pkgutil.resolve_name(KERNELS[PACKAGES[name]])
    plain = plain_delta_functions()
    tried = replace(plain, **{name: getattr(picked, name)})
    for rows, tokens in TRIALS:
        found, expected = (trial_values(each, rows, tokens, shape, device, dtype) for each in (tried, plain))
        wrong = first_difference(found, expected, TOLERANCE[dtype])
        if wrong is not None:
            return f"{rows} rows of {tokens} tokens: {wrong}"
    return None


def trial_values(
    functions: DeltaFunctions, rows: int, tokens: int, shape: DeltaShape, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Outputs and states of the rule on random rows, with all gradients unless the rows are a decode step."""
    like = torch.empty(0, device=device, dtype=dtype)
    exact = like.float()
    channels = sum(shape.widths)
    # separate queries, keys and values: in one tensor, the largest gradient would hide an error in the others
    sizes = zip(("query", "key", "value"), shape.widths, strict=True)
    inputs = {
        name: random_tensor(rows, tokens, size, like=like, seed=index) for index, (name, size) in enumerate(sizes)
    }
    inputs |= {
        "log_decay": random_tensor(rows, tokens, shape.value_heads, like=exact, seed=3).exp() * -0.1,
        "beta": random_tensor(rows, tokens, shape.value_heads, like=like, seed=4).sigmoid(),
        "conv_CK": random_tensor(channels, shape.window, like=like, seed=5) * 0.3,
        "tail_RKC": random_tensor(rows, shape.window - 1, channels, like=like, seed=6),
        "memory_RVDF": random_tensor(rows, shape.value_heads, shape.key_dim, shape.value_dim, like=exact, seed=7) * 0.1,
    }

    def run(query: Tensor, key: Tensor, value: Tensor, tail_RKC: Tensor, memory_RVDF: Tensor, **of: Tensor) -> Tensors:
        given = DeltaInputs(mixed=torch.cat([query, key, value], -1), **of)
        out, after = delta_rule(given, DeltaState(tail_RKC, memory_RVDF), shape, functions)
        return {"output": out, "state": after.memory_RVDF}

    if tokens > 1:
        return values_and_gradients(run, inputs)
    with torch.no_grad():
        return dict(run(**inputs))


def slow_delta_note(shape: DeltaShape, device: torch.device, dtype: torch.dtype) -> str | None:
    """Startup note if a kernel of the delta nets failed its trial, or is not installed on a GPU machine; else None."""
    refusals = delta_refusals(delta_functions(), shape, device, dtype)
    reasons = "; ".join(f"the kernel {name} of {PACKAGES[name]}: {reason}" for name, reason in refusals.items())
    missing = [package for package, module in KERNELS.items() if find_spec(module) is None]
    if missing and device.type != "cpu":
        reasons = "; ".join(filter(None, (reasons, f"not installed: pip install {' '.join(missing)}")))
    return f"delta nets: plain torch functions run, many times slower than kernels ({reasons})" if reasons else None


def _gather(x_NX: Tensor, index_RT: Tensor) -> Tensor:
    rows: Tensor = x_NX.index_select(0, index_RT.flatten()).unflatten(0, tuple(index_RT.shape))
    return rows
