"""LoRA in the engine: adapters beside the weights, as in the trainer, and at addresses that stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fovea.config.model import Lora, Model, TinyModel
from fovea.models.linear_factors import factors_of, merged_weight
from fovea.models.tiny import TinyParts
from fovea.models.trainable import choose_trainable, lora_layers, merged_weights
from fovea.models.vlm import VLM
from fovea.rollout.embedded.decode_step import GraphStepper
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.rollout.embedded.linears import OneDnnLinears, PlainLinears, can_use_onednn
from fovea.rollout.embedded.paged_cache import PagedCache
from fovea.rollout.embedded.tuning import Tuning
from fovea.train.packing import pack_row
from fovea.types import Completion, Prompt
from fovea.weights.sync import SharedWeights
from fovea_gym.utils.event_loop import wait_for
from tests.policies import make_batch, make_policy
from tests.rollout.drawing import LOGPROB_TOLERANCE, generate, noted, seeded
from tests.tiny_models import CPU, mixed_prompts, tiny

SMALL_RATIO = 5e-4
"""Of the norm of an adapter's matrix to that of its weight: usual early in a run."""


def with_lora(dtype: torch.dtype, ratio: float, family: str = "qwen3_vl", **settings: object) -> TinyParts:
    """A tiny model with adapters of this relative size on all layers of the language model."""
    parts = tiny(family, **settings)
    parts.network.to(dtype)
    choose_trainable(parts.network, Model(tiny=TinyModel(), lora=Lora(rank=4)), seed=0)
    for number, layer in enumerate(lora_layers(parts.network).values()):
        factors = factors_of(layer)
        assert factors.up is not None
        assert factors.down is not None
        with torch.no_grad():
            factors.up.normal_(generator=torch.Generator().manual_seed(number))
            size = (factors.scale * factors.up.float() @ factors.down.float()).norm()
            factors.up.mul_(ratio * factors.weight.float().norm() / size)
    return parts


def engine_of(parts: TinyParts, **tuning: Any) -> EmbeddedEngine:
    """An engine on the tensors of the policy, adapters beside the weights."""
    vlm = VLM(parts.network, parts.processor.banned_ids)
    engine = EmbeddedEngine(vlm, parts.processor, max_batch_tokens=10_000, tuning=Tuning(**tuning))
    wait_for(SharedWeights(engine).sync(0))
    return engine


def difference(parts: TinyParts, prompts: list[Prompt], sampled: list[list[Completion]]) -> np.ndarray:
    """The engine's log-probs less the trainer's, of every token."""
    assert {c.logprobs_T.dtype.name for group in sampled for c in group} == {"float32"}, "also of a bfloat16 model"
    row = pack_row(parts.processor.family, prompts, [[c.token_ids_T for c in group] for group in sampled], CPU)
    with torch.no_grad():
        trained = VLM(parts.network, parts.processor.banned_ids)(row, temperature=1.0, chunk_tokens=10_000).logprobs_A
    return np.concatenate([c.logprobs_T for group in sampled for c in group]) - trained.numpy()


WIDE = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2}


@pytest.mark.parametrize("cache", ["dense", "paged"])
@pytest.mark.parametrize(
    ("family", "sizes"), [("qwen2_vl", {}), ("qwen3_vl", {}), ("qwen3_vl_moe", {}), ("qwen3_vl", WIDE)]
)
def test_the_engine_draws_from_the_adapted_model(family: str, sizes: dict[str, int], cache: str) -> None:
    """A wide model decodes with copies in oneDNN's layout, into which the adapters are merged."""
    parts = with_lora(torch.float32, 0.3, family, **sizes)
    prompts = mixed_prompts(parts)
    sampled = generate(engine_of(parts, cache=cache), prompts, seeded(3, max_new_tokens=12), n=4)
    assert Tuning().uses_onednn(12, parts.network.get_input_embeddings().weight) == bool(sizes)
    assert np.abs(difference(parts, prompts, sampled)).max() < LOGPROB_TOLERANCE


def test_small_adapters_count_in_bfloat16() -> None:
    """First tokens, which both sides compute from the same rows: equal to float rounding. Merged, seven of eight
    weights stay as they were."""
    parts = with_lora(torch.bfloat16, SMALL_RATIO)
    changed = [
        (merged_weight(factors_of(x)) != factors_of(x).weight).float().mean()
        for x in lora_layers(parts.network).values()
    ]
    assert 0.05 < float(torch.stack(changed).mean()) < 0.25
    prompts, samplings = mixed_prompts(parts), seeded(3, max_new_tokens=1)
    beside = difference(parts, prompts, generate(engine_of(parts), prompts, samplings, n=16))
    assert np.abs(beside).max() < LOGPROB_TOLERANCE
    merged = tiny("qwen3_vl")
    merged.network.bfloat16()
    merged_engine = engine_of(merged)
    merged_engine.load_weights(dict(merged_weights(parts.network)), version=0)
    rounded = difference(parts, prompts, generate(merged_engine, prompts, samplings, n=16))
    assert np.abs(rounded).mean() > 100 * LOGPROB_TOLERANCE


def test_bfloat16_decode_copies_leave_adapters_beside_the_weights() -> None:
    """Adapters so small that merging rounds most of them away: copies must compute what plain layers do."""
    layer = next(iter(lora_layers(with_lora(torch.bfloat16, SMALL_RATIO).network).values()))
    factors = factors_of(layer)
    if not can_use_onednn(factors.weight):
        pytest.skip("oneDNN has no bfloat16 products for this CPU")
    x = torch.randn(32, factors.weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        (plain,), (copied,) = PlainLinears([factors], None)(x), OneDnnLinears([factors], None)(x)
        merged = torch.nn.functional.linear(x, merged_weight(factors), factors.bias)
    assert (copied - plain).abs().mean() < 0.1 * (merged - plain).abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_outlive_a_weight_sync_and_read_the_new_adapters(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[type] = []
    for kind in (GraphStepper, PagedCache):
        noted(monkeypatch, kind, "__init__", lambda self, *_, **__: made.append(type(self)))
    parts = with_lora(dtype, 0.3)
    engine, prompts = engine_of(parts, cache="paged"), mixed_prompts(parts)
    policy = make_policy(parts, temperature=1.0, learning_rate=1e-2, lr_warmup_steps=0)
    before = generate(engine, prompts, seeded(3, max_new_tokens=8), n=2)
    assert made == [PagedCache, GraphStepper]
    old = dict(merged_weights(parts.network))
    policy.update(make_batch(parts))
    assert any(not torch.equal(old[name], x) for name, x in merged_weights(parts.network))
    assert wait_for(SharedWeights(engine).sync(1)).bytes_copied == 0
    after = generate(engine, prompts, seeded(3, max_new_tokens=8), n=2)
    assert made == [PagedCache, GraphStepper], "those from before the weight sync"
    limit = LOGPROB_TOLERANCE if dtype == torch.float32 else 0.1
    assert np.abs(difference(parts, prompts, after)).max() < limit
    assert np.abs(difference(parts, prompts, before)).max() > limit, "sampled before the update"
