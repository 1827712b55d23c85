"""Kernels over segments: flash kernels against their slow twin on a GPU, and what is said where they are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fovea.models.shared_prefix import attention
from fovea.models.shared_prefix.attention import KERNELS, fastest_kernel, slow_attention_note
from fovea.models.shared_prefix.layout import shared_prefix_layout
from fovea.models.varlen import FlashSegments, HeadShape, Pairs, PlainSegments, Segments, flash_refusal, varlen_refusal
from fovea.models.vision.attention import segment_attention
from fovea.models.vision.passes import image_passes
from fovea.types import PromptImage
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


def test_a_refusal_is_said_with_its_message_and_the_kernel_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash_refusal", lambda _: "no such head width")
    monkeypatch.setattr(attention, "varlen_refusal", lambda _: None)
    note = slow_attention_note(CUDA_HALF)
    assert fastest_kernel(CUDA_HALF) == "varlen_gathered"
    assert note is not None
    assert "no such head width" in note
    assert "model.attention=varlen_gathered" in note
    monkeypatch.setattr(attention, "varlen_refusal", lambda _: "float")
    float32 = HeadShape(torch.device("cuda"), torch.float32, 4, 2, 64)
    note = slow_attention_note(float32)
    assert fastest_kernel(float32) == "sdpa"
    assert note is not None
    assert "model.dtype=bfloat16 avoids it" in note


def test_images_are_split_by_their_patches() -> None:
    images = [
        PromptImage(key=str(n), tensors={"x": np.zeros(0)}, num_tokens=1, grid=(1, 1, patches))
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
    inputs = (
        random(sum(queries), 16, 128, seed=0, device="cuda", dtype=torch.bfloat16),
        random(sum(keys), 8, 128, seed=1, device="cuda", dtype=torch.bfloat16),
        random(sum(keys), 8, 128, seed=2, device="cuda", dtype=torch.bfloat16),
    )
    pairs = Pairs(
        queries=Segments.of(queries, inputs[0].device),
        keys=Segments.of(keys, inputs[0].device),
        causal=causal,
        scale=128**-0.5,
    )
    gradient = random(sum(queries), 16, 128, seed=3, device="cuda", dtype=torch.bfloat16)
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
    ours, _ = segment_attention(
        F.scaled_dot_product_attention,
        torch.nn.Identity(),
        *inputs,
        scaling=width**-0.5,
        cu_seq_lens_q=offsets.cuda(),
        max_length_q=max(lengths),
    )
    segments = Segments.of(lengths, inputs[0].device)
    plain, _ = PlainSegments().forward(
        tuple(x[0].transpose(0, 1) for x in inputs),  # type: ignore[arg-type]
        Pairs(queries=segments, keys=segments, causal=False, scale=width**-0.5),
    )
    torch.testing.assert_close(ours[0].float(), plain.float(), atol=BFLOAT16, rtol=0)
