"""Reference log-probs, entropies and states from transformers' own forward on one unpacked completion at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import SuppressTokensLogitsProcessor

from fovea.models.families.qwen_vl import IMAGE_PAD
from fovea.models.shared_prefix.layout import PackedRow
from fovea.models.tiny import TinyParts
from fovea.models.vision.attention import use_segment_attention
from fovea.models.vlm import VLM
from fovea.train.packing import pack_row
from fovea.types import Prompt
from fovea_gym.types import Message
from tests.tiny_models import CPU, mixed_prompts, random_completions

UNEQUAL = ((5, 1, 7), (3, 9), (4,))
"""Lengths of the completions of `mixed_prompts` in a row."""
OF_DECAY = re.compile(r"linear_attn\.(A_log|dt_bias|in_proj_a)")


def model_inputs(parts: TinyParts, prompt: Prompt, completion: np.ndarray) -> dict[str, Tensor]:
    """Inputs of transformers' model for prompt + completion; positions are left to the model."""
    ids = torch.from_numpy(np.concatenate([prompt.token_ids_L, completion]))[None]
    inputs = {"input_ids": ids}
    if prompt.images:
        pad = int(parts.processor.tokenizer.convert_tokens_to_ids(IMAGE_PAD))
        inputs["pixel_values"] = torch.from_numpy(np.concatenate([x.tensors["pixel_values"] for x in prompt.images]))
        inputs["image_grid_thw"] = torch.tensor([image.tensors["image_grid_thw"].tolist() for image in prompt.images])
        inputs["mm_token_type_ids"] = (ids == pad).int()
    return inputs


def chat_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as transformers' chat templates take them."""

    def content(part: object) -> dict[str, str]:
        return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}

    return [{"role": each.role, "name": each.tool, "content": list(map(content, each.parts))} for each in messages]


def vlm_of(parts: TinyParts, **more: Any) -> VLM:
    return VLM(parts.network, parts.processor.banned_ids, **more)


def row_of(
    parts: TinyParts, counts: Sequence[Sequence[int]] = UNEQUAL, prompts: Sequence[Prompt] | None = None
) -> PackedRow:
    """Random completions of these lengths in a packed row, of `mixed_prompts` or others."""
    return pack_row(parts.processor.family, prompts or mixed_prompts(parts), random_completions(counts), CPU)


def of_row(
    score: Callable[..., Tensor],
    parts: TinyParts,
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[np.ndarray]],
    *more: float,
) -> Tensor:
    """What a function of this module gives for each completion, in the order of a packed row."""
    pairs = [(prompt, each) for prompt, group in zip(prompts, completions, strict=True) for each in group]
    return torch.cat([score(parts, *pair, *more) for pair in pairs])


def reference_logprobs(parts: TinyParts, prompt: Prompt, completion: np.ndarray, temperature: float = 1.0) -> Tensor:
    predictions = _predictions(parts, prompt, completion, temperature)
    return predictions.gather(1, torch.from_numpy(completion)[:, None])[:, 0]


def reference_entropy(parts: TinyParts, prompt: Prompt, completion: np.ndarray, temperature: float = 1.0) -> Tensor:
    """Entropies [T] by transformers' sdpa attention and torch's own distribution."""
    logprobs = _predictions(parts, prompt, completion, temperature)
    # of the drawn ids only: the gradients at a log-prob of -inf are NaN
    return torch.distributions.Categorical(logits=logprobs[:, ~logprobs[0].isinf()]).entropy()


def _predictions(parts: TinyParts, prompt: Prompt, completion: np.ndarray, temperature: float) -> Tensor:
    """Log-probs [T, vocabulary] at each token by transformers' sdpa attention, and its own mask of banned ids."""
    network = parts.network
    network.set_attn_implementation("sdpa")
    try:
        logits = network(**model_inputs(parts, prompt, completion), use_cache=False).logits[0]
    finally:
        use_segment_attention(network)
    scaled = logits[prompt.num_tokens - 1 : -1].float() / temperature
    suppress = SuppressTokensLogitsProcessor(parts.processor.banned_ids)
    return suppress(torch.zeros(0), scaled).log_softmax(-1)  # type: ignore[arg-type]


def reference_states(parts: TinyParts, prompt: Prompt, completion: np.ndarray) -> Tensor:
    """Last hidden states [T, width] from which each token of the completion is predicted."""
    network = parts.network
    network.set_attn_implementation("sdpa")
    try:
        states: Tensor = network.model(**model_inputs(parts, prompt, completion), use_cache=False).last_hidden_state[0]
    finally:
        use_segment_attention(network)
    return states[prompt.num_tokens - 1 : -1]


def gradients(network: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    network.zero_grad()
    return found


def largest_relative_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Largest |a - b| / |a| over all parameters; both must have the same names.

    In float32 without those of the decay of delta nets, whose gradients are sums of far larger numbers of both signs:
    `tests/models/families/test_qwen3_5.py` compares them in float64.
    """
    assert first.keys() == second.keys(), sorted(first.keys() ^ second.keys())
    compared = [name for name, x in first.items() if x.dtype == torch.double or not OF_DECAY.search(name)]
    return max(float((first[name] - second[name]).norm() / (first[name].norm() + 1e-12)) for name in compared)
