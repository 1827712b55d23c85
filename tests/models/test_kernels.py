"""Kernels of a layer against transformers and autograd; those that fail or are wrong are refused with the reason."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb

from fovea.config.run import Config
from fovea.models import delta_rule as rule
from fovea.models import kernels
from fovea.models.decoder import TORCH_KERNELS, Kernels, decoder_shape, kernels_for, kernels_refusal
from fovea.models.delta_rule import DeltaInputs, DeltaShape, DeltaState, delta_refusals, delta_rule, slow_delta_note
from fovea.models.heads import HeadNorm, Triple, heads, unfused_heads
from fovea.models.kernels import ReadSaved, RmsNorm, silu_times, use_fused_layers
from fovea.models.policy_network import PolicyNetwork
from fovea.models.rope import Rope, rotate
from fovea.models.tiny import TinyParts
from fovea.models.transformers_versions import DeltaFunctions, plain_delta_functions
from fovea.models.trials import why_refused
from fovea.models.varlen import HeadShape
from fovea.models.vlm import VLM
from fovea.rollout.embedded.paged_attention import paged_refusal
from fovea.train.packing import pack_row
from fovea.wiring import model as wired_model
from fovea.wiring.model import liger_note, liger_refusal, make_vlm
from gym_tests.tables import table
from tests.tiny_models import CPU, random_completions, renderer, tiny, user


def outputs_and_gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = module(x)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    assert x.grad is not None
    return [out, x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_layer_equals_its_original(parts: TinyParts, dtype: torch.dtype) -> None:
    parts.network.to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # one rounding of bfloat16 is 8e-3
    original, fused = parts.network, copy.deepcopy(parts.network)
    use_fused_layers(fused, kernels_for(decoder_shape(fused.config.text_config)).norm)
    compared = set()
    for (name, module), (_, other) in zip(original.named_modules(), fused.named_modules(), strict=True):
        kind = type(module).__name__
        if not kind.endswith(("RMSNorm", "PatchEmbed")):
            continue
        width = module.proj.weight[0].numel() if kind.endswith("PatchEmbed") else module.weight.shape[0]
        x = torch.randn(6, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        for a, b in zip(outputs_and_gradients(module, x), outputs_and_gradients(other, x), strict=True):
            torch.testing.assert_close(b, a, atol=tolerance, rtol=tolerance, msg=name)
        compared.add(kind)
    assert len(compared) >= 2, compared


def test_the_gradient_is_that_of_the_formula() -> None:
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)

    written_out = torch.autograd.functional.jacobian(
        lambda a, w: w * a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6), (x, weight)
    )
    ours = torch.autograd.functional.jacobian(lambda a, w: RmsNorm.apply(a, w, 1e-6), (x, weight))
    for a, b in zip(ours, written_out, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.ones(8)
    RmsNorm.apply(x, weight, 1e-6).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


TOKENS, HEADS, KEY_HEADS, WIDTH = 7, 4, 2, 8


def rope(width: int = WIDTH) -> Rope:
    angles = torch.randn(TOKENS, width // 2).repeat(1, 2)
    return Rope.of(angles.cos(), angles.sin())


def projections(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(TOKENS, heads * WIDTH).to(dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]


def run(function: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> tuple[list[Tensor], int]:
    """Outputs and gradients, and the bytes of rows of tokens that were saved for these."""
    leaves, saved = [x.clone().requires_grad_() for x in inputs], dict[int, Tensor]()

    def count(x: Tensor) -> Tensor:
        if x.shape[0] == TOKENS and x.shape[-1] == WIDTH:
            saved[x.data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        outs = function(*leaves)
    loss = sum((out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() for out in outs)
    assert isinstance(loss, Tensor)
    loss.backward()
    return [*outs, *(x.grad for x in leaves if x.grad is not None)], sum(x.nbytes for x in saved.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_that_are_read_again_equal_those_that_are_kept(dtype: torch.dtype) -> None:
    kept, positions = projections(dtype), rope()
    positions = Rope(positions.cos_ND.to(dtype), positions.sin_ND.to(dtype), positions.signed_sin_ND.to(dtype))
    weights = [torch.rand(WIDTH).to(dtype) + 0.5 for _ in range(2)]

    def with_norm(function: Callable[..., Triple], *saved: Sequence[ReadSaved]) -> Callable[..., Triple]:
        def run_heads(query: Tensor, key: Tensor, value: Tensor, *norms: Tensor) -> Triple:
            # times 1: what is read again is not what went in
            projected = (query * 1, key * 1, value * 1)
            return function(projected, WIDTH, HeadNorm(*norms, 1e-6), positions, *saved)

        return run_heads

    saved = [lambda x=x: x.clone() for x in kept]
    reading, few_bytes = run(with_norm(heads, saved), *kept, *weights)
    keeping, many_bytes = run(with_norm(unfused_heads), *kept, *weights)

    for ours, theirs in zip(reading, keeping, strict=True):
        assert torch.equal(ours, theirs)
    assert few_bytes == 0
    # float32 copies of queries and keys, and what the rotation keeps once for all layers
    tables = 2 * TOKENS * WIDTH * dtype.itemsize
    assert many_bytes == TOKENS * (HEADS + KEY_HEADS) * WIDTH * 4 + tables


def test_swiglu_of_inputs_that_are_read_again_saves_none_of_them() -> None:
    gate, up = torch.randn(2, TOKENS, WIDTH).unbind()
    saved = [lambda x=x: x.clone() for x in (gate, up)]
    reading, few_bytes = run(lambda a, b: [silu_times(a * 1, b * 1, saved)], gate, up)
    keeping, many_bytes = run(lambda a, b: [silu_times(a * 1, b * 1)], gate, up)

    for ours, theirs in zip(reading, keeping, strict=True):
        assert torch.equal(ours, theirs)
    assert few_bytes == 0
    assert many_bytes == 3 * TOKENS * WIDTH * 4, "gate, up and silu(gate)"


@pytest.mark.parametrize("trained", [True, False])
def test_the_rotation_equals_that_of_transformers(trained: bool) -> None:
    positions = rope()
    query, key = torch.randn(TOKENS, HEADS, WIDTH), torch.randn(TOKENS, KEY_HEADS, WIDTH)

    def ours(query: Tensor, key: Tensor) -> list[Tensor]:
        return list(rotate(query, key, positions))

    def theirs(query: Tensor, key: Tensor) -> list[Tensor]:
        batch = (x.transpose(0, 1)[None] for x in (query, key))
        rotated = apply_rotary_pos_emb(*batch, positions.cos_ND[None], positions.sin_ND[None])
        return [x[0].transpose(0, 1) for x in rotated]

    with torch.set_grad_enabled(trained):
        found, expected = (run(turn, query, key)[0] if trained else turn(query, key) for turn in (ours, theirs))
    torch.testing.assert_close(found, expected)


def test_tables_narrower_than_a_head_are_not_for_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """GLM turns half of each head, and Liger's kernel would turn the whole of it by these angles."""
    for part, name in (("rms_norm", "LigerRMSNorm"), ("rope", "LigerRope"), ("swiglu", "LigerSiLUMul")):
        module = ModuleType(part)
        setattr(module, f"{name}Function", None)
        monkeypatch.setitem(sys.modules, f"liger_kernel.ops.{part}", module)
    angles = torch.randn(5, 4).repeat(1, 2)
    query, key, rope = torch.randn(5, 2, 16), torch.randn(5, 1, 16), Rope.of(angles.cos(), angles.sin())
    # under another name, since the module that others import has the real package
    on_stand_ins = spec_from_file_location("kernels_on_stand_ins", Path(kernels.__file__).with_name("kernels_liger.py"))
    on_stand_ins.loader.exec_module(liger := module_from_spec(on_stand_ins))
    found = liger.rotate_row(query, key, rope)
    for mine, other in zip(found, rotate(query, key, rope), strict=True):
        assert torch.equal(mine, other)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SHAPE = DeltaShape(is_delta=(True, False), key_heads=2, value_heads=4, key_dim=16, value_dim=16, window=4)
GATED = "Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results"


class OutOfResources(Exception):
    """As Triton's, of no type that torch's kernels raise."""


class CompilationError(Exception):
    """As Triton's."""


class Backward(torch.autograd.Function):
    """The identity, with a factor on the gradient; None raises, as flash-linear-attention does on Hopper."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float | None) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.factor is None:
            raise RuntimeError(GATED)
        return gradients[0] * ctx.factor, None


def with_backward(function: Callable[..., Any], factor: float | None, place: int = 0) -> Callable[..., Any]:
    """The function with another gradient of one of its inputs."""

    def wrapped(*given: Any, **options: Any) -> Any:
        # gradients only: the rollout, which has none, runs through
        changed = Backward.apply(given[place], factor) if torch.is_grad_enabled() else given[place]
        return function(*given[:place], changed, *given[place + 1 :], **options)

    return wrapped


def times(function: Callable[..., Any], factor: float, place: int | None = None) -> Callable[..., Any]:
    """The function with its output, or one of its outputs, off by a factor."""

    def wrapped(*given: Any, **options: Any) -> Any:
        found = function(*given, **options)
        return found * factor if place is None else (*found[:place], found[place] * factor, *found[place + 1 :])

    return wrapped


def raising(error: Exception) -> Callable[[], str | None]:
    def trial() -> str | None:
        raise error

    return trial


@table(
    ("error", "reason"),
    [
        (OutOfResources("out of resource: shared memory"), "OutOfResources: out of resource: shared memory"),
        (CompilationError("at 12:8:\n    x = y\n    ^\nNameError('y')"), "CompilationError: at 12:8: NameError('y')"),
        (subprocess.CalledProcessError(1, ["gcc"]), "CalledProcessError: Command '['gcc']' returned non-zero"),
        (ModuleNotFoundError("No module named 'triton'"), "ModuleNotFoundError: No module named 'triton'"),
        (OSError("libcuda.so: cannot open"), "OSError: libcuda.so: cannot open"),
        (KeyError("sm_90"), "KeyError: 'sm_90'"),
        (AssertionError(), "AssertionError at test_"),
    ],
)
def test_whatever_a_kernel_raises_is_its_refusal(error: Exception, reason: str) -> None:
    assert str(why_refused(raising(error))).startswith(reason)


@table("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_out_of_memory_says_nothing_of_a_kernel(error: Exception) -> None:
    with pytest.raises(type(error)):
        why_refused(raising(error))


@pytest.mark.skipif(find_spec("triton") is not None, reason="Triton is installed")
def test_decoding_without_triton_is_refused() -> None:
    assert paged_refusal(HeadShape(CPU, torch.float32, 4, 2, 16), 16) == "ModuleNotFoundError: No module named 'triton'"


WRONG_DELTA = [
    ("chunks", lambda f: with_backward(f, None), f"RuntimeError: {GATED}"),
    ("chunks", lambda f: with_backward(f, 1.1), "3 rows of 3 tokens: gradient of query is off by "),
    ("chunks", lambda f: with_backward(f, 1.1, 1), "3 rows of 3 tokens: gradient of key is off by "),
    ("chunks", lambda f: with_backward(f, 1.1, 2), "3 rows of 3 tokens: gradient of value is off by "),
    ("chunks", lambda f: times(f, 1.1, 1), "3 rows of 3 tokens: state is off by 1.0e-01"),
    ("step", lambda f: times(f, 1.1, 0), "5 rows of 1 tokens: output is off by 1.0e-01"),
    ("convolve", lambda f: with_backward(f, 1.1, 1), "3 rows of 3 tokens: gradient of conv_CK is off by 1.0e-01"),
    ("convolve", lambda f: with_backward(f, None), f"RuntimeError: {GATED}"),
]


def installed(monkeypatch: pytest.MonkeyPatch, picked: DeltaFunctions) -> None:
    """As if the packages were installed, and transformers had picked these functions."""
    for name in rule.KERNELS.values():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(rule, "delta_functions", lambda: picked)


@DTYPES
def test_plain_delta_functions_pass_their_own_trial(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_delta_functions()
    installed(monkeypatch, plain)
    assert delta_refusals(plain, SHAPE, CPU, dtype) == {}
    assert slow_delta_note(SHAPE, torch.device("cpu"), dtype) is None


@DTYPES
@pytest.mark.parametrize(("name", "wrong", "reason"), WRONG_DELTA)
def test_a_wrong_function_of_delta_nets_is_refused_by_itself(
    name: str, wrong: Callable[[Any], Any], reason: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = plain_delta_functions()
    picked = replace(plain, **{name: wrong(getattr(plain, name))})
    installed(monkeypatch, picked)
    refusals = delta_refusals(picked, SHAPE, CPU, dtype)
    assert list(refusals) == [name]
    assert refusals[name].startswith(reason)
    assert refusals[name] in slow_delta_note(SHAPE, CPU, dtype)


def test_a_package_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """transformers then runs plain functions."""
    (tmp_path / "causal_conv1d.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    note = slow_delta_note(replace(SHAPE, window=3), CPU, torch.float32)
    assert "convolve of causal-conv1d: OSError: undefined symbol" in str(note)


def gradients_of(vlm: PolicyNetwork, parts: TinyParts) -> list[Tensor]:
    """Gradients of all parameters on one packed row."""
    row = pack_row(vlm.family, [renderer(parts).prompt(user("How many?"))], random_completions([[5, 70]]), CPU)
    vlm(row, temperature=1.0, chunk_tokens=100).logprobs_A.sum().backward()
    return [x.grad for x in vlm.parameters() if x.grad is not None]


def test_a_model_with_refused_delta_kernels_trains_with_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> tuple[VLM, list[Tensor]]:
        parts = tiny("qwen3_5", num_layers=2)
        vlm = VLM(parts.network, parts.processor.banned_ids)
        return vlm, gradients_of(vlm, parts)

    (_, expected), plain = trained(), plain_delta_functions()
    assert expected
    for wrong in (None, 1.1):
        installed(monkeypatch, replace(plain, chunks=with_backward(plain.chunks, wrong)))
        vlm, found = trained()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        (note,) = vlm.slow_kernels()
        assert "delta nets: plain torch functions run" in note


def test_many_rows_are_parts_below_the_end_of_a_grid() -> None:
    """Values and gradients are those of a single call."""
    shape = DeltaShape(is_delta=(True,), key_heads=1, value_heads=2, key_dim=2, value_dim=2, window=2)
    plain, seen = plain_delta_functions(), []

    def counted(query: Tensor, *given: Any, **options: Any) -> Any:
        seen.append(query.shape[0] * query.shape[2])
        return plain.chunks(query, *given, **options)

    rows = 40_000
    random = torch.Generator().manual_seed(0)
    mixed = torch.randn(rows, 2, sum(shape.widths), generator=random).requires_grad_()
    given = DeltaInputs(
        mixed=mixed,
        log_decay=-torch.rand(rows, 2, 2, generator=random),
        beta=torch.rand(rows, 2, 2, generator=random),
        conv_CK=torch.randn(sum(shape.widths), 2, generator=random),
        lengths_R=torch.randint(1, 3, (rows,), generator=random),
    )
    before = DeltaState.zeros(rows, shape, mixed)
    out, after = delta_rule(given, before, shape, replace(plain, chunks=counted))
    assert seen == [65_534, 14_466]
    halves = [delta_rule(*part, shape, plain) for part in zip(given.split(20_000), before.split(20_000), strict=True)]
    assert torch.allclose(out, torch.cat([half for half, _ in halves]))
    assert torch.equal(after.tail_RKC, DeltaState.cat([state for _, state in halves]).tail_RKC)
    assert torch.allclose(after.memory_RVDF, DeltaState.cat([state for _, state in halves]).memory_RVDF)
    (gradient,) = torch.autograd.grad(out.sum(), mixed)
    (expected,) = torch.autograd.grad(sum(half.sum() for half, _ in halves), mixed)
    assert torch.allclose(gradient, expected)


WRONG_KERNELS = [
    ({"gate": with_backward(TORCH_KERNELS.gate, None)}, f"RuntimeError: {GATED}"),
    ({"gate": with_backward(TORCH_KERNELS.gate, 1.1, 1)}, "1 tokens: gradient of up is off by 1.0e-01"),
    ({"norm": times(TORCH_KERNELS.norm, 1.1)}, "1 tokens: RMS norm is off by 1.0e-01"),
    ({"norm": with_backward(TORCH_KERNELS.norm, 1.1, 1)}, "1 tokens: gradient of weight is off by 1.0e-01"),
    ({"heads": times(TORCH_KERNELS.heads, 1.1, 1)}, "1 tokens: keys is off by 1.0e-01"),
]


@DTYPES
def test_plain_kernels_pass_their_own_trial(dtype: torch.dtype) -> None:
    for family in ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe"):
        text_config = tiny(family).network.config.get_text_config()
        assert kernels_refusal(replace(TORCH_KERNELS), text_config, CPU, dtype) is None


@DTYPES
@pytest.mark.parametrize(("wrong", "reason"), WRONG_KERNELS)
def test_wrong_kernels_are_refused(wrong: dict[str, Any], reason: str, dtype: torch.dtype) -> None:
    text_config = tiny("qwen3_vl").network.config.get_text_config()
    refusal = kernels_refusal(replace(TORCH_KERNELS, **wrong), text_config, CPU, dtype)
    assert str(refusal).startswith(reason)


@pytest.mark.parametrize(("wrong", "reason"), WRONG_KERNELS[:2])
def test_a_run_with_refused_liger_kernels_has_plain_ones_and_a_note(
    wrong: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(setting: bool) -> list[Tensor]:
        parts = tiny("qwen3_vl")
        config = Config.model_validate({"model": {"tiny": {}}, "train": {"backend": {"liger_kernels": setting}}})
        vlm = make_vlm(config, parts.network, parts.processor.banned_ids)
        if setting:
            refusal = liger_refusal(config, vlm.text_config, CPU, vlm.dtype)
            assert liger_note(True, refusal).startswith(f"slow: Liger's kernels are not used ({reason}")
        return gradients_of(vlm, parts)

    expected = trained(False)
    monkeypatch.setattr(wired_model, "liger_kernels", lambda device: replace(TORCH_KERNELS, **wrong))
    assert all(torch.equal(a, b) for a, b in zip(trained(True), expected, strict=True))


def test_liger_that_is_installed_and_cannot_be_imported_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate({"model": {"tiny": {}}})

    def broken(device: torch.device) -> Kernels:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(wired_model, "liger_kernels", broken)
    refusal = liger_refusal(config, tiny("qwen3_vl").network.config.get_text_config(), CPU, torch.float32)
    assert refusal == "OSError: libcuda.so.1: cannot open shared object file"
