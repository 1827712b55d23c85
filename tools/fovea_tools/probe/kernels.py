"""Checks of the kernels: values and gradients compared with plain functions, and rates.

Axes: `N` tokens of a packed row, `B` rows of a decode batch, `H` query heads, `J` key heads, `D` width of a head, `S`
tokens of a page, `X` pages of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3VLTextConfig

from fovea.config.sections import Train
from fovea.models.decoder import TORCH_KERNELS, kernels_refusal
from fovea.models.delta_rule import (
    CHUNK,
    KERNELS,
    PACKAGES,
    DeltaShape,
    delta_refusals,
    fastest_functions,
    trial_values,
)
from fovea.models.experts import Experts, route
from fovea.models.shared_prefix.attention_cuda import SharedVarlen
from fovea.models.shared_prefix.layout import SharedPrefixLayout, shared_prefix_layout
from fovea.models.transformers_versions import delta_functions, plain_delta_functions
from fovea.models.trials import Tensors, differences, first_difference, random_tensor, values_and_gradients
from fovea.models.varlen import HeadShape, flash_refusal, varlen_refusal
from fovea.rollout.embedded.paged_attention import paged_attention, paged_refusal
from fovea.rollout.embedded.paged_cache import PagedKernel, gathered_attention, shared_prompts
from fovea.rollout.embedded.tuning import PAGE_TOKENS
from fovea.train.adamw import AdamWSettings
from fovea.train.torch.optimizer import Optimizer
from fovea.utils.tensor_records import map_tensors
from fovea.wiring.model import LIGER, liger_kernels
from fovea_tools.probe.rates import CheckFailed, Rates, best_kernel_seconds, best_seconds, seconds_of

Heads = tuple[int, int, int]
"""Number of query heads, number of key heads, and width of a head."""
LANGUAGE_HEADS: Mapping[str, Heads] = {
    "Qwen3-VL-2B": (16, 8, 128),
    "Qwen2.5-VL-3B": (16, 2, 128),
    "Qwen2.5-VL-7B": (28, 4, 128),
    "Qwen3-VL-8B": (32, 8, 128),
}
VISION_HEADS: Mapping[str, Heads] = {
    "Qwen3-VL-2B's tower": (16, 16, 64),
    "Qwen3-VL-8B's tower": (16, 16, 72),
    "Qwen2.5-VL's tower": (16, 16, 80),
}
PROMPTS, COMPLETIONS = (356, 300, 17), ((512, 3, 200, 1), (50, 50, 50), (9,))
"""Tokens of the packed row: prompts, and their completions, some beyond 256 tokens and some with only a few."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest norm of a difference, relative to the norm of the values."""
DECODED_ROWS, DECODED_KEYS = 256, 1024
TRIED_ON_CPU = (4, 64)
"""Rows and keys of a decode step on a CPU, which only shows that the check runs."""


def packed_rows(device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Compare the update's attention, forward and backward, with torch's attention of each completion on the CPU."""
    layout = shared_prefix_layout(PROMPTS, COMPLETIONS)
    for name, heads in LANGUAGE_HEADS.items():
        shape = HeadShape(device, dtype, *heads)
        refusal = None if device.type == "cpu" else flash_refusal(shape)
        if refusal is not None:
            raise CheckFailed(f"{name}: refused: {refusal}")
        found = packed_differences(layout, shape)
        differences = ", ".join(f"{what} {value:.1e}" for what, value in found.items())
        if not max(found.values()) <= TOLERANCE[dtype]:
            raise CheckFailed(f"{name}: off by {differences}, and rounding explains less than {TOLERANCE[dtype]}")
        yield f"{name}: right; relative differences: {differences}"


def packed_differences(layout: SharedPrefixLayout, shape: HeadShape) -> dict[str, float]:
    """Relative differences of output and gradients between `SharedVarlen` on a device and plain attention."""
    random = torch.Generator().manual_seed(0)
    tokens = sum(prompt + sum(completions) for prompt, completions in layout.lengths)
    counts = (shape.heads, shape.key_heads, shape.key_heads, shape.heads)
    *inputs, gradient = (
        torch.randn(tokens, heads, shape.width, generator=random).to(shape.dtype).float() for heads in counts
    )
    attention = SharedVarlen.of(layout.to(shape.device), shape.width**-0.5)
    leaves = [x.to(shape.device, shape.dtype, copy=True).requires_grad_() for x in inputs]
    out = attention(*leaves)
    out.backward(gradient.to(out))
    plain_leaves = [x.requires_grad_() for x in inputs]
    plain = plain_attention(layout, *plain_leaves)
    plain.backward(gradient)
    found = [out.detach(), *(_gradient(x) for x in leaves)]
    expected = [plain.detach(), *(_gradient(x) for x in plain_leaves)]
    names = ("output", "of queries", "of keys", "of values")
    return {name: _relative(a, b) for name, a, b in zip(names, found, expected, strict=True)}


def plain_attention(layout: SharedPrefixLayout, query_NHD: Tensor, key_NJD: Tensor, value_NJD: Tensor) -> Tensor:
    """Attention of every prompt, and of every completion after its prompt, computed one after the other."""
    outs, start = [], 0
    for prompt, completions in layout.lengths:
        of_prompt = torch.arange(start, start + prompt)
        outs.append(_causal(query_NHD, key_NJD, value_NJD, of_prompt))
        start += prompt
        for completion in completions:
            both = torch.cat([of_prompt, torch.arange(start, start + completion)])
            outs.append(_causal(query_NHD, key_NJD, value_NJD, both)[prompt:])
            start += completion
    return torch.cat(outs)


def _causal(query_NHD: Tensor, key_NJD: Tensor, value_NJD: Tensor, tokens: Tensor) -> Tensor:
    query, key, value = (x[tokens].transpose(0, 1)[None] for x in (query_NHD, key_NJD, value_NJD))
    out: Tensor = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.cpu().float() - expected).norm() / expected.norm())


def vision_rows(device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Check the attention of vision towers, for each width of their heads."""
    for name, heads in VISION_HEADS.items():
        if device.type == "cpu":
            yield f"{name}: not tried, since there is no kernel for CPUs"
            continue
        refusal = varlen_refusal(HeadShape(device, dtype, *heads))
        if refusal is not None:
            raise CheckFailed(f"{name}: refused, so a slower kernel encodes images: {refusal}")
        yield f"{name}: right"


def decoding(device: torch.device, dtype: torch.dtype, measure: Callable[[], Rates | CheckFailed]) -> Iterator[str]:
    """Compare the attention of decode steps with its plain version, and its rate with that of reading memory."""
    rates = measure()
    for name, heads in LANGUAGE_HEADS.items():
        shape = HeadShape(device, dtype, *heads)
        if device.type == "cpu":
            rate = decode_rate(gathered_attention, shape, *TRIED_ON_CPU)
            yield f"{name}: no kernel for CPUs; the plain version reads {rate / 1e9:,.1f} GB/s"
            continue
        refusal = paged_refusal(shape, PAGE_TOKENS)
        if refusal is not None:
            raise CheckFailed(f"{name}: {refusal}")
        rate = decode_rate(paged_attention, shape, DECODED_ROWS, DECODED_KEYS)
        share = "" if isinstance(rates, CheckFailed) else f", {rate / rates.read:.0%} of reading"
        yield f"{name}: right; {DECODED_ROWS} rows of {DECODED_KEYS} keys: {rate / 1e9:,.0f} GB/s{share}"


def decode_rate(kernel: PagedKernel, shape: HeadShape, rows: int, keys: int) -> float:
    """Bytes of keys and values that a kernel reads per second."""
    wide = -(-keys // PAGE_TOKENS)
    size = (1 + rows * wide, PAGE_TOKENS, shape.key_heads, shape.width)
    stored_keys, stored_values = (torch.randn(size, device=shape.device, dtype=shape.dtype) for _ in range(2))
    table_BX = (1 + torch.randperm(rows * wide, device=shape.device)).view(rows, wide).int()
    used_B = torch.full((rows,), keys, dtype=torch.int32, device=shape.device)
    query_BHD = torch.randn(rows, shape.heads, shape.width, device=shape.device, dtype=shape.dtype)
    alone = map_tensors(lambda x: x.to(shape.device), shared_prompts([], rows, 0))
    given = query_BHD, stored_keys, stored_values, table_BX, used_B, alone.tokens_B, alone.mates_BR
    seconds = best_kernel_seconds(
        lambda: kernel(*given, shape.width**-0.5),
        str(shape.device.type),
    )
    return 2 * rows * keys * shape.key_heads * shape.width * shape.dtype.itemsize / seconds


DELTA_SHAPE = DeltaShape(is_delta=(True,), key_heads=16, value_heads=32, key_dim=128, value_dim=128, window=4)
"""Delta nets as in Qwen3.5-4B and 9B."""
TIMED_ROWS, TIMED_TOKENS = 8, 512


def delta_nets(device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Compare the functions that transformers picks for the delta rule with plain torch: values, gradients, seconds."""
    on_cpu = device.type == "cpu"
    shape = replace(DELTA_SHAPE, key_heads=2, value_heads=4) if on_cpu else DELTA_SHAPE
    rows, tokens = (2, CHUNK) if on_cpu else (TIMED_ROWS, TIMED_TOKENS)
    missing = [package for package, module in KERNELS.items() if find_spec(module) is None]
    if missing:
        yield f"not installed: {', '.join(missing)}; plain torch functions are used instead"
    refusals = delta_refusals(delta_functions(), shape, device, dtype)
    usable = fastest_functions(shape, device, dtype)
    found, plain = (
        trial_values(each, rows, tokens, shape, device, dtype) for each in (usable, plain_delta_functions())
    )
    yield ", ".join(f"{name} {value:.1e}" for name, value in differences(found, plain).items())
    for name, functions in (("run", usable), ("plain", plain_delta_functions())):
        call = partial(trial_values, functions, rows, tokens, shape, device, dtype)
        yield f"{name}: {rows} rows of {tokens} tokens, both passes: {1e3 * best_seconds(call, device.type):,.1f} ms"
    if refusals:
        reasons = "; ".join(f"{name} of {PACKAGES[name]}: {reason}" for name, reason in refusals.items())
        raise CheckFailed(f"refused, so plain torch functions are used instead: {reasons}")


def liger(device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Compare Liger's kernels with plain functions, for the heads and widths of language models."""
    if find_spec(LIGER) is None or device.type == "cpu":
        yield "not installed" if device.type != "cpu" else "not tried, since its kernels run only on CUDA"
        return
    for name, (heads, key_heads, width) in LANGUAGE_HEADS.items():
        text_config = Qwen3VLTextConfig(
            hidden_size=heads * width,
            intermediate_size=3 * heads * width,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            head_dim=width,
        )
        refusal = kernels_refusal(liger_kernels(device), text_config, device, dtype)
        if refusal is not None:
            raise CheckFailed(f"{name}: refused, so torch's operators are used instead: {refusal}")
        yield f"{name}: right"


def experts(device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Compare grouped products of a mixture of experts, of Qwen3-VL-30B-A3B's size, with each expert on all tokens."""
    count, width, expert_width, per_token = (4, 32, 16, 2) if device.type == "cpu" else (128, 2048, 768, 8)
    like, tokens = torch.empty(0, device=device, dtype=dtype), 64
    inputs = {
        "x": random_tensor(tokens, width, like=like),
        "gate_up": random_tensor(count, 2 * expert_width, width, like=like, seed=1) * width**-0.5,
        "down": random_tensor(count, width, expert_width, like=like, seed=2) * expert_width**-0.5,
    }
    router_XE = random_tensor(count, width, like=like, seed=3)
    weight_NK, expert_NK = route(inputs["x"], router_XE, per_token)

    def outputs(grouped: bool, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensors:
        layer = Experts(router_XE=router_XE, gate_up_XGE=gate_up, down_XEF=down, per_token=per_token)
        run = layer.run_grouped if grouped else layer.run_all
        return {"output": run(x, weight_NK, expert_NK, TORCH_KERNELS.gate)}

    found, plain = (values_and_gradients(partial(outputs, grouped), inputs) for grouped in (True, False))
    wrong = first_difference(found, plain, TOLERANCE[dtype])
    if wrong is not None:
        raise CheckFailed(wrong)
    yield "right; " + ", ".join(f"{name} {value:.1e}" for name, value in differences(found, plain).items())


def host_masters(device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Compare AdamW steps on master weights in host memory with those of a model on the CPU."""
    size = 2**12 if device.type == "cpu" else 2**26
    settings = AdamWSettings.of_run(Train(), max_steps=2, peak_rate=1e-3)
    weights, seconds = [], []
    for place in (device, torch.device("cpu")):
        parameter = torch.nn.Parameter(random_tensor(size, like=torch.empty(0, dtype=dtype)).to(place))
        optimizer = Optimizer({"weight": parameter}, settings, on_host=place.type != "cpu")
        for step in range(2):
            optimizer.set_rate(step)
            parameter.grad = random_tensor(size, like=torch.empty(0), seed=1 + step).to(place)
            seconds.append(seconds_of(optimizer.step, place.type))
        weights.append(parameter.detach().cpu())
    if not torch.equal(*weights):
        raise CheckFailed(f"weights are off by {float((weights[0].float() - weights[1].float()).abs().max()):.1e}")
    yield f"right; {size / seconds[1] / 1e9:,.2f} billion parameters per second"
