"""Kernels over segments and shared prefixes against their slow twins, and what is said where they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fovea.models.shared_prefix import attention
from fovea.models.shared_prefix.attention import (
    KERNELS,
    RowAttention,
    fastest_kernel,
    gathered_attention,
    slow_attention_note,
)
from fovea.models.shared_prefix.attention_cpu import MIN_SHORT_BACKWARD_TOKENS, merged_attention
from fovea.models.shared_prefix.layout import SharedPrefixLayout, shared_prefix_layout
from fovea.models.varlen import (
    NAMES,
    TOLERANCE,
    FlashSegments,
    HeadShape,
    Pairs,
    PlainSegments,
    Segments,
    Triple,
    by_segments,
    difference,
    flash_refusal,
    varlen_refusal,
)
from fovea.models.vision.attention import eager_attention, segment_attention
from fovea.models.vision.tower_inputs import image_passes
from fovea.types import PromptImage
from tests.meta_device import META
from tests.tiny_models import CPU

BFLOAT16 = 0.02
"""Difference of outputs of about 1 that its 8 bits explain."""
FLOAT32 = 2e-6
CUDA_HALF = HeadShape(torch.device("cuda"), torch.bfloat16, 4, 2, 64)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def random(*shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def test_two_calls_are_one_softmax() -> None:
    """The completions' output and log-sum-exp over prompt and own keys, and all gradients, as with gathered keys."""
    layout = shared_prefix_layout([5, 3, 4], [[4, 1, 0], [], [6]])
    results = []
    for kernel in ("varlen", "varlen_gathered", "eager"):
        inputs = [random(23, heads, 8, seed=seed).requires_grad_() for seed, heads in enumerate((4, 2, 2))]
        out = KERNELS[kernel](layout, 0.3)(*inputs)
        (out * random(*out.shape, seed=9)).sum().backward()
        results.append([out, *(x.grad for x in inputs)])
    for ours, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(ours, other, atol=FLOAT32, rtol=0)


def test_a_row_without_completions_is_one_call() -> None:
    layout = shared_prefix_layout([5, 3], [[], []])
    inputs = [random(8, heads, 8, seed=seed) for seed, heads in enumerate((4, 2, 2))]
    ours, other = (KERNELS[kernel](layout, 0.3)(*inputs) for kernel in ("varlen", "eager"))
    torch.testing.assert_close(ours, other, atol=FLOAT32, rtol=0)


def test_what_torch_says_is_passed_on() -> None:
    """A CPU is a device that refuses them."""
    shape = HeadShape(CPU, torch.bfloat16, 4, 2, 64)
    assert "_flash_attention_forward" in str(flash_refusal(shape))
    assert "_flash_attention_forward" in str(varlen_refusal(shape))


def test_a_trial_goes_beyond_128_and_256_tokens() -> None:
    """As seen by the operators behind `varlen_attn`, forward and backward, on a device without numbers."""
    for refusal in (flash_refusal, varlen_refusal):
        with torch.inference_mode(), Longest() as seen:
            assert refusal(HeadShape(META, torch.bfloat16, 4, 2, 72)) is None
        for operator in ("_varlen_attn", "_varlen_attn_backward"):
            causal = [longest for name, longest, is_causal in seen.calls if name == operator and is_causal]
            full = [longest for name, longest, is_causal in seen.calls if name == operator and not is_causal]
            # causal: each with as many queries as keys, and with half as many
            assert causal == [(40, 40), (20, 40), (130, 130), (65, 130), (300, 300), (150, 300)]
            assert full == [(40, 40), (130, 130), (300, 300)]


class Longest(TorchDispatchMode):
    """Notes the longest segments of queries and keys of each call of a variable-length operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, tuple[int, int], bool]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == "torch_attn":
            values = dict(zip((x.name for x in operator._schema.arguments), args, strict=False)) | (kwargs or {})
            longest = (values["max_q"], values["max_k"])
            self.calls.append((operator._schema.name.removeprefix("torch_attn::"), longest, values["is_causal"]))
        return operator(*args, **(kwargs or {}))


class WrongBeyond(PlainSegments):
    """Right unless a segment of queries is longer; then the log-sum-exp or a gradient is another."""

    def __init__(self, limit: int, wrong: str) -> None:
        self.limit, self.wrong = limit, wrong

    def forward(self, inputs: Triple, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().forward(inputs, pairs)
        if self.wrong == "output":
            out = torch.where(torch.arange(len(out))[:, None, None] < self.limit, out, 0)
        elif self.wrong == "log-sum-exp" and pairs.queries.longest > self.limit:
            lse = lse.flip(0)
        return out, lse

    def backward(
        self, gradient: torch.Tensor, inputs: Triple, out: torch.Tensor, lse: torch.Tensor, pairs: Pairs
    ) -> Triple:
        found = super().backward(gradient, inputs, out, lse, pairs)
        scale = 0.5 if self.wrong == "gradient of keys" and pairs.queries.longest > self.limit else 1
        return found[0], found[1] * scale, found[2]


@pytest.mark.parametrize(
    ("limit", "wrong", "tokens"),
    [
        (41, "output", "40, 2"),
        (128, "log-sum-exp", "130, 40"),
        (128, "gradient of keys", "130, 40"),
        (256, "log-sum-exp", "300, 1, 257"),
        (256, "gradient of keys", "300, 1, 257"),
        (556, "output", "300, 1, 257"),
    ],
)
def test_a_kernel_with_other_values_is_refused(limit: int, wrong: str, tokens: str) -> None:
    attention, twin = by_segments(WrongBeyond(limit, wrong), 0.7), by_segments(PlainSegments(), 0.7)
    for dtype in (torch.float32, torch.bfloat16):
        found = difference(attention, twin, HeadShape(CPU, dtype, 4, 2, 16))
        assert str(found).startswith(f"{wrong} of causal attention to segments of {tokens} tokens: off by ")


@pytest.mark.parametrize(("heads", "key_heads", "width"), [(2, 1, 128), (2, 2, 72)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_rounding_does_is_no_refusal(dtype: torch.dtype, heads: int, key_heads: int, width: int) -> None:
    """By torch's flash attention of CPUs, a third implementation, at a third of what is tolerated."""
    shape = HeadShape(CPU, dtype, heads, key_heads, width)
    tolerance = {kind: value / 3 for kind, value in TOLERANCE.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fovea.models.varlen.TOLERANCE", tolerance)
        assert difference(by_sdpa, by_segments(PlainSegments()), shape) is None


def by_sdpa(inputs: Triple, gradient: torch.Tensor, pairs: Pairs) -> dict[str, torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    lengths = (pairs.queries.lengths, pairs.keys.lengths, pairs.keys.lengths)
    outs = []
    for query, key, value in zip(*(x.split(n) for x, n in zip(leaves, lengths, strict=True)), strict=True):
        times = query.shape[1] // key.shape[1]
        q, k, v = (x.transpose(0, 1)[None] for x in (query, *(x.repeat_interleave(times, 1) for x in (key, value))))
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask if pairs.causal else None)[0])
    out = torch.cat(outs, 1).transpose(0, 1)
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, leaves, gradient)), strict=True))


def test_a_refusal_is_said_with_its_message_and_the_kernel_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash_refusal", lambda _: "no such head width")
    monkeypatch.setattr(attention, "varlen_refusal", lambda _: None)
    note = slow_attention_note(CUDA_HALF)
    assert fastest_kernel(CUDA_HALF) == "varlen_gathered"
    assert "no such head width" in note
    assert "model.attention=varlen_gathered" in note
    monkeypatch.setattr(attention, "varlen_refusal", lambda _: "float")
    float32 = HeadShape(torch.device("cuda"), torch.float32, 4, 2, 64)
    assert fastest_kernel(float32) == "sdpa"
    assert "model.dtype=bfloat16 avoids it" in slow_attention_note(float32)


def test_images_are_split_by_their_patches() -> None:
    images = [
        PromptImage(key=str(n), tensors={}, num_tokens=1, grid=(1, 1, patches))
        for n, patches in enumerate((4, 4, 2, 30, 1))
    ]
    parts = [[image.key for image in part] for part in image_passes(images, 8)]
    assert parts == [["0", "1"], ["2"], ["3"], ["4"]]
    assert [len(part) for part in image_passes(images, 1)] == [1] * 5
    assert list(image_passes([], 8)) == []


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("causal", [True, False])
def test_flash_segments_are_the_plain_ones(causal: bool) -> None:
    queries, keys = [70, 1, 300], [70, 1, 300] if causal else [256, 9, 130]
    flash, plain = FlashSegments(), PlainSegments()
    shapes = ((sum(queries), 16, 128), (sum(keys), 8, 128), (sum(keys), 8, 128), (sum(queries), 16, 128))
    *inputs, gradient = (random(*shape, seed=n, device="cuda", dtype=torch.bfloat16) for n, shape in enumerate(shapes))
    of_queries, of_keys = (Segments.of(lengths, inputs[0].device) for lengths in (queries, keys))
    pairs = Pairs(queries=of_queries, keys=of_keys, causal=causal, scale=128**-0.5)
    results = []
    for one in (flash, plain):
        out, lse = one.forward(inputs, pairs)
        # as if there were further keys: output and log-sum-exp are not those of the call
        out, lse = out * 0.5, lse + 0.7
        of_inputs = one.backward(gradient, inputs, out, lse, pairs)
        results.append([out, lse, *of_inputs])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.float(), b.float(), atol=BFLOAT16 * float(b.abs().max()), rtol=0)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("width", [64, 72, 80])
def test_the_towers_one_call_is_that_of_each_image(width: int) -> None:
    lengths = [256, 64, 700]
    offsets = torch.tensor([0, 256, 320, 1020], dtype=torch.int32)
    inputs = [random(1, 16, 1020, width, seed=n, device="cuda", dtype=torch.bfloat16) for n in range(3)]
    shape = HeadShape(inputs[0].device, torch.bfloat16, 16, 16, width)
    assert varlen_refusal(shape) is None
    lengths_of = {"cu_seq_lens_q": offsets.cuda(), "max_length_q": max(lengths)}
    sdpa, module = F.scaled_dot_product_attention, torch.nn.Identity()
    ours, _ = segment_attention(sdpa, module, *inputs, scaling=width**-0.5, **lengths_of)
    segments = Segments.of(lengths, inputs[0].device)
    pairs = Pairs(queries=segments, keys=segments, causal=False, scale=width**-0.5)
    plain, _ = PlainSegments().forward(tuple(x[0].transpose(0, 1) for x in inputs), pairs)
    torch.testing.assert_close(ours[0].float(), plain.float(), atol=BFLOAT16, rtol=0)


HEADS, KEY_HEADS, WIDTH = 4, 2, 32
SCALE = WIDTH**-0.5
ROUNDING = 0.01
"""Of the largest gradient: bfloat16 has 8 bits, and the bfloat16_gradients are sums of rounded terms."""


def bfloat16_gradients(attend: RowAttention, row: list[Tensor], of_output: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in row]
    (attend(*leaves) * of_output).sum().backward()
    return [x.grad for x in leaves if x.grad is not None]


def random_row(layout: SharedPrefixLayout) -> tuple[list[Tensor], Tensor]:
    """Query, key and value of a row, and a gradient of the output, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(layout.return_index_N), heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    *row, of_output = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return row, of_output


LENGTHS = {"short": ((5, 17), (9,)), "long": ((MIN_SHORT_BACKWARD_TOKENS, 3), (8,))}


@pytest.mark.parametrize("completions", LENGTHS.values(), ids=LENGTHS)
def test_bfloat16_gradients_are_off_by_no_more_than_their_rounding(completions: tuple[tuple[int, ...], ...]) -> None:
    layout = shared_prefix_layout([20, 33], completions)
    row, of_output = random_row(layout)
    found = bfloat16_gradients(merged_attention(layout, SCALE), row, of_output)
    plain = gathered_attention(eager_attention, layout, SCALE)
    expected = bfloat16_gradients(plain, [x.double() for x in row], of_output.double())
    for mine, exact in zip(found, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - exact).abs().max() < ROUNDING * exact.abs().max()
