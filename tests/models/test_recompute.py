"""Gradient checkpointing: the gradients of a pass without it, the memory and the matrix products of each kind."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fovea.config.loading import load_config
from fovea.config.model import Lora, Model, TinyModel
from fovea.models.recompute import Recompute, kept_bytes, recompute_activations
from fovea.models.trainable import choose_trainable, trainable_parameters
from fovea.models.vlm import VLM
from fovea.train.packing import pack_row
from fovea.train.update_metrics import ActivationMeter
from fovea_gym.errors import ConfigError
from tests.tiny_models import CPU, mixed_prompts, random_completions, tiny

MID = {
    "hidden_size": 128,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 384,
    "vision_hidden_size": 96,
    "vision_depth": 2,
}
SETTINGS = {
    "trained tower": ("qwen2_5_vl", Model(tiny=TinyModel())),
    "deepstack": ("qwen3_vl", Model(tiny=TinyModel())),
    "experts": ("qwen3_vl_moe", Model(tiny=TinyModel())),
    "lora": ("qwen2_vl", Model(tiny=TinyModel(), lora=Lora(rank=4))),
    "dropout": ("qwen3_vl", Model(tiny=TinyModel(), lora=Lora(rank=4, dropout=0.2))),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What a forward and backward pass gave and took."""

    gradients: dict[str, torch.Tensor]
    num_bytes: int
    flops: int


def grouped_flops(first: torch.Size, second: torch.Size, *_args: object, **_kwargs: object) -> int:
    """Of a product of experts, which torch does not count: each row of one factor with the columns of one expert."""
    return 2 * first.numel() * second[-1]


def run(family: str, settings: Model, how: Recompute) -> Pass:
    parts = tiny(family, **MID)
    choose_trainable(parts.network, settings, seed=0)
    recompute_activations(parts.network, how)
    vlm = VLM(parts.network, parts.processor.banned_ids).train()
    row = pack_row(parts.processor.family, mixed_prompts(parts), random_completions([(9, 20), (30,), (25, 5)]), CPU)
    meter = ActivationMeter(vlm, lambda: kept_bytes(vlm.network))
    torch.manual_seed(0)
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped_flops}) as counter:
        with meter(1):
            scores = vlm(row, temperature=1.0, chunk_tokens=1000)
        scores.logprobs_A.sum().backward()
    trained = trainable_parameters(vlm)
    return Pass(
        gradients={name: x.grad for name, x in trained.items() if x.grad is not None},
        num_bytes=meter.num_bytes,
        flops=counter.get_total_flops(),
    )


@pytest.mark.parametrize(("family", "settings"), SETTINGS.values(), ids=SETTINGS)
def test_each_kind_gives_the_gradients_of_none_and_keeps_less(family: str, settings: Model) -> None:
    none, selective, full = (run(family, settings, how) for how in ("none", "selective", "full"))
    for found in (selective, full):
        assert found.gradients.keys() == none.gradients.keys()
        assert all(torch.equal(found.gradients[name], x) for name, x in none.gradients.items())
    assert none.num_bytes > 1.4 * selective.num_bytes > 1.4 * 2 * full.num_bytes


@pytest.mark.parametrize("name", ["deepstack", "experts"])
def test_selective_multiplies_no_more_matrices_than_none(name: str) -> None:
    none, selective, full = (run(*SETTINGS[name], how) for how in ("none", "selective", "full"))
    assert selective.flops == none.flops
    assert full.flops > 1.2 * none.flops


@pytest.mark.parametrize("value", ["true", "false"])
def test_what_was_a_switch_names_its_values(value: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.gradient_checkpointing: \w+ does not fit; allowed: none \| full"):
        load_config([], ["model.tiny={}", f"train.gradient_checkpointing={value}"])
