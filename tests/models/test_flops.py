"""The arithmetic of a pass against what torch counts in transformers' own models, with every score computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from fovea.config.model import Lora, Model, TinyModel
from fovea.models.families.registry import family_of
from fovea.models.flops import Passes, Work, training_passes
from fovea.models.shared_prefix.attention import completion_keys
from fovea.models.shared_prefix.layout import shared_prefix_layout
from fovea.models.tiny import TinyParts
from fovea.models.trainable import choose_trainable
from fovea.types import Prompt
from fovea_tools.families.tiny import KINDS, save_tiny_kind
from tests.hub_models import CHATS, Loaded, needs_image_processors
from tests.reference import model_inputs
from tests.tiny_models import CORPUS, FAMILIES, image, renderer, tiny, user, with_dense_layer

COMPLETION = np.arange(3, 14)
NOT_COUNTED = ("rotary_emb", "rotary_pos_emb")


def odd_model(family: str) -> TinyParts:
    """No two sizes alike, so that none can stand in for another; several layers of windows."""
    heads = {"hidden_size": 96, "num_heads": 4, "num_kv_heads": 2}
    sizes = {"intermediate_size": 112, "num_layers": 3, "vision_hidden_size": 48, "vision_depth": 3, "vision_heads": 4}
    parts = tiny(family, **heads, **sizes, num_experts=5, experts_per_token=3)
    return with_dense_layer(parts) if family == "qwen3_vl_moe" else parts


def eager(parts: TinyParts) -> TinyParts:
    """Scores and sums of attention, and experts one by one, as matrix products, which torch counts."""
    parts.network.set_attn_implementation("eager")
    parts.network.set_experts_implementation("eager")
    return parts


def pictures(parts: TinyParts) -> Prompt:
    """Sides that are whole windows of the tiny tower (4 patches), and sides that are not."""
    return renderer(parts).prompt(user(image(1, 64, 96), "one and", image(2, 48, 80), "two"))


def counted(parts: TinyParts, prompt: Prompt, *, backward: bool = False) -> int:
    """What torch counts of prompt + completion, without the positions and the rule of delta nets."""
    inputs = model_inputs(parts, prompt, COMPLETION)
    kind = parts.network.config.model_type
    module = modeling_qwen3_5_moe if kind == "qwen3_5_moe" else modeling_qwen3_5
    with (
        patch.object(module, "torch_chunk_gated_delta_rule", no_rule),
        patch.object(module, "causal_conv1d_fn", lambda x, weight, *_, **__: x * weight.sum(-1)[:, None]),
        FlopCounterMode(display=False) as counter,
    ):
        logits = parts.network(**inputs, use_cache=False).logits
        if backward:
            logits.sum().backward()
    counts = {name: sum(operations.values()) for name, operations in counter.get_flop_counts().items()}
    return counter.get_total_flops() - sum(n for name, n in counts.items() if name.rsplit(".", 1)[-1] in NOT_COUNTED)


def no_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: object) -> tuple[Tensor, None]:
    """A stand-in for the delta rule that reads all inputs, without a matrix product."""
    return value * (g + beta + query.sum((2, 3))[..., None] + key.sum((2, 3))[..., None])[..., None], None


def convolution(parts: TinyParts) -> int:
    """FLOPs of a token in the convolutions of delta nets, for which `counted` has stand-ins."""
    text = parts.network.config.text_config
    kinds = getattr(text, "layer_types", None) or []
    if "linear_attention" not in kinds:
        return 0
    widths = 2 * text.linear_num_key_heads * text.linear_key_head_dim
    widths += text.linear_num_value_heads * text.linear_value_head_dim
    return int(kinds.count("linear_attention") * 2 * text.linear_conv_kernel_dim * widths)


def weights(parts: TinyParts, name: str) -> int:
    return dict(parts.network.named_parameters())[name].numel()


def expected(parts: TinyParts, prompt: Prompt, passes: Passes) -> float:
    """All N^2 pairs of tokens: eager attention computes the masked ones too."""
    work = family_of(parts.network.config, "").work
    tokens = prompt.num_tokens + len(COMPLETION)
    linear = tokens * (work.token - convolution(parts) + work.action)
    return passes.linear * linear + passes.attention * tokens**2 * work.pair + work.images(prompt.images, passes)


@pytest.fixture(params=FAMILIES)
def odd(request: pytest.FixtureRequest) -> TinyParts:
    return eager(odd_model(request.param))


def test_the_forward_pass_is_what_torch_counts(odd: TinyParts) -> None:
    prompt, passes = pictures(odd), Passes(linear=1, attention=1, vision=1, vision_attention=1)
    with torch.no_grad():
        assert counted(odd, prompt) == expected(odd, prompt, passes)


def test_a_training_pass_is_three_forward_passes(odd: TinyParts) -> None:
    """But for the pixels, of which nobody wants a gradient."""
    prompt, passes = pictures(odd), training_passes(lora=False, trains_vision=True, features_cached=False)
    patches = sum(len(picture.tensors["pixel_values"]) for picture in prompt.images)
    of_pixels = 2 * weights(odd, "model.visual.patch_embed.proj.weight") * patches
    assert counted(odd, prompt, backward=True) == expected(odd, prompt, passes) - of_pixels


def test_a_frozen_tower_runs_forward_once(odd: TinyParts) -> None:
    choose_trainable(odd.network, Model(tiny=TinyModel(), freeze_vision_tower=True), seed=0)
    prompt, passes = pictures(odd), training_passes(lora=False, trains_vision=False, features_cached=False)
    assert passes.vision == 1
    assert counted(odd, prompt, backward=True) == expected(odd, prompt, passes)


def test_lora_saves_the_weight_gradients(odd: TinyParts) -> None:
    """Torch counts the adapters on top, and leaves out input gradients that end at the frozen embeddings."""
    choose_trainable(odd.network, Model(tiny=TinyModel(), lora=Lora(rank=2)), seed=0)
    prompt, passes = pictures(odd), training_passes(lora=True, trains_vision=False, features_cached=False)
    tokens = prompt.num_tokens + len(COMPLETION)
    adapters = sum(p.numel() for name, p in odd.network.named_parameters() if ".lora_" in name)
    names = ["linear_attn.in_proj_" + name for name in ("qkv", "z", "b", "a")]
    is_delta = odd.network.config.model_type in ("qwen3_5", "qwen3_5_moe")
    names = names if is_delta else [f"self_attn.{name}_proj" for name in ("q", "k", "v")]
    first = [f"model.language_model.layers.0.{name}" for name in names]
    frozen = sum(weights(odd, f"{name}.{of}.weight") for name in first for of in ("base_layer", "lora_A.default"))
    found = counted(odd, prompt, backward=True)
    assert found == expected(odd, prompt, passes) + 2 * tokens * (3 * adapters - frozen)


def test_lora_saves_the_weight_gradients_of_the_vision_tower_too(odd: TinyParts) -> None:
    """Torch counts the adapters on top, and leaves out input gradients that end at the frozen patch embedding."""
    lora = Lora(rank=2, parts=("language_model", "vision_tower", "projector"))
    choose_trainable(odd.network, Model(tiny=TinyModel(), lora=lora), seed=0)
    prompt, passes = pictures(odd), training_passes(lora=True, trains_vision=True, features_cached=False)
    tokens, patches = prompt.num_tokens + len(COMPLETION), sum(len(x.tensors["pixel_values"]) for x in prompt.images)
    merged = sum(picture.num_tokens for picture in prompt.images)
    rows = {"language_model": tokens, "merger": merged, "deepstack_merger_list": merged, "blocks": patches}
    adapters = sum(
        next(number for part, number in rows.items() if f".{part}." in name) * parameter.numel()
        for name, parameter in odd.network.named_parameters()
        if ".lora_" in name
    )
    first = "model.visual.blocks.0.attn.qkv"
    frozen = ("model.visual.patch_embed.proj.weight", f"{first}.base_layer.weight", f"{first}.lora_A.default.weight")
    no_gradient = patches * sum(weights(odd, name) for name in frozen)
    found = counted(odd, prompt, backward=True)
    assert found == expected(odd, prompt, passes) + 2 * (3 * adapters - no_gradient)


@pytest.mark.parametrize("lengths", [[7], [1, 1], [4, 9, 1, 6]])
def test_a_group_has_the_pairs_that_its_layout_allows(lengths: Sequence[int]) -> None:
    """The mask of the packed row itself says who looks at whom."""
    prompt_tokens = 5
    pairs_only = Work(token=0, pair=1, action=0, patch=0, image_pair=0, window_pair=0, window_side=0)
    layout = shared_prefix_layout([prompt_tokens], [[n - 1 for n in lengths]])
    allowed = int(completion_keys(layout)[1].sum())
    # queries that are padding: the mask lets them look, the layout does not return them
    padded = max(lengths) - 1
    of_padding = sum(sum(prompt_tokens + t + 1 for t in range(n - 1, padded)) for n in lengths)
    causal = int(torch.ones(prompt_tokens, prompt_tokens).tril().sum())
    made = pairs_only.prompt(prompt_tokens, []) + sum(pairs_only.completion(n, prompt_tokens) for n in lengths)
    assert made == causal + allowed - of_padding


def test_a_group_has_each_token_once_and_a_head_for_every_action() -> None:
    work = Work(token=1, pair=0, action=100, patch=0, image_pair=0, window_pair=0, window_side=0)
    # a prompt of 5, completions of 4 and 1: 5 + 3 + 0 tokens of the row, 4 + 1 actions
    assert work.prompt(5, []) + work.completion(4, 5) + work.completion(1, 5) == 8 + 500


def test_features_that_are_there_cost_nothing() -> None:
    parts = tiny("qwen3_vl")
    work, images = family_of(parts.network.config, "").work, pictures(parts).images
    cached = training_passes(lora=False, trains_vision=False, features_cached=True)
    assert work.prompt(30, images, cached) == work.prompt(30, [], cached)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_delta_rule_has_gradients_on_both_sides_also_under_lora(family: str) -> None:
    """By hand: each of three products with a state [key, value] of each head, two FLOPs per number, three times."""
    parts = odd_model(family)
    text, work = parts.network.config.text_config, family_of(parts.network.config, "").work
    state = text.linear_num_value_heads * text.linear_key_head_dim * text.linear_value_head_dim
    assert work.rule == text.layer_types.count("linear_attention") * 3 * 2 * state
    passes = training_passes(lora=True, trains_vision=False, features_cached=True)
    without = replace(work, rule=0.0)
    assert work.prompt(7, [], passes) - without.prompt(7, [], passes) == 3 * 7 * work.rule
    assert work.completion(7, 5, passes) - without.completion(7, 5, passes) == 3 * 6 * work.rule


CLASS_TOKENS = {"internvl", "vipllava"}
"""Types whose tower has a token besides the patches of a tile, 36 here."""


# Gemma 4 has matrices outside its layers, and its tower computes padding
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"gemma4"}))
@needs_image_processors
def test_a_hub_models_forward_pass_is_what_torch_counts(kind: str, tmp_path: Path) -> None:
    """With every score of attention computed, and experts one by one."""
    loaded = Loaded.of(save_tiny_kind(kind, tmp_path, CORPUS))
    loaded.network.set_attn_implementation("eager")
    loaded.network.set_experts_implementation("eager")
    prompt, family = loaded.prompts[1], loaded.processor.family
    given = {name: torch.as_tensor(x) for name, x in loaded.inputs(CHATS[1]).items()}
    with torch.no_grad(), FlopCounterMode(display=False, depth=10) as counter:
        loaded.network(**given, use_cache=False)
    counts = {name: sum(operations.values()) for name, operations in counter.get_flop_counts().items()}
    of = type(loaded.network).__name__
    vision = sum(counts.get(f"{of}.{path}", 0) for path in family.vision_paths)
    positions = sum(count for name, count in counts.items() if name.rsplit(".", 1)[-1] in NOT_COUNTED)
    work, tokens = family.work, prompt.num_tokens
    assert counts[f"{of}.{family.language_path}"] - positions == tokens * work.token + tokens**2 * work.pair
    assert work.images(prompt.images) == pytest.approx(vision, rel=0.03 if kind in CLASS_TOKENS else 1e-12)
