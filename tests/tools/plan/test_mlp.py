"""What a plan counts for a model with experts against what autograd keeps of a packed row."""

from __future__ import annotations

import pytest

from fovea.config.loading import load_config
from fovea.models.recompute import Recompute, kept_bytes, recompute_activations
from fovea.models.vlm import VLM
from fovea.tools.plan.activations import Numerics, decoder_stages, embedding_stage, expert_weights, head_stage
from fovea.tools.plan.model_sizes import model_sizes
from fovea.tools.plan.workload import RowShape
from fovea.train.packing import pack_row
from fovea.train.update_metrics import ActivationMeter
from tests.tiny_models import CPU, random_completions, renderer, tiny, user

MID = {"hidden_size": 128, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
COMPLETIONS, LENGTH = 8, 40


@pytest.mark.parametrize("how", ["none", "selective"])
@pytest.mark.parametrize(
    "mlp",
    [
        {"family": "qwen3_vl", "intermediate_size": 384},
        {"family": "qwen3_vl_moe", "intermediate_size": 96},
        {"family": "qwen3_vl_moe", "intermediate_size": 256},
    ],
    ids=["dense", "experts", "wide experts"],
)
def test_the_activations_of_a_row_are_those_that_autograd_keeps(mlp: dict[str, object], how: Recompute) -> None:
    parts = tiny(**MID, **mlp)  # type: ignore[arg-type]
    prompt = renderer(parts).prompt(user("What colour is the square? " * 10))
    row = pack_row(parts.processor.family, [prompt], random_completions([(LENGTH,) * COMPLETIONS]), CPU)
    recompute_activations(parts.network, how)
    vlm = VLM(parts.network, parts.processor.banned_ids).train()
    meter = ActivationMeter(vlm, lambda: kept_bytes(vlm.network))
    with meter(1):
        scores = vlm(row, temperature=1.0, chunk_tokens=10_000)
    scores.logprobs_A.sum().backward()
    settings = MID | mlp | {"vocabulary_size": len(parts.processor.tokenizer)}
    config = load_config([], ["model.device=cpu", f"train.gradient_checkpointing={how}", "model.tiny={}"])
    config = config.model_copy(
        update={"model": config.model.model_validate({**config.model.model_dump(), "tiny": settings})}
    )
    sizes, numerics = model_sizes(config), Numerics(width=4, cuda=False)
    shape = RowShape(
        tokens=row.num_tokens,
        actions=row.num_actions,
        predictors=COMPLETIONS * (LENGTH - 1) + 1,
        block_tokens=row.num_tokens,
        keys=prompt.num_tokens + COMPLETIONS * (prompt.num_tokens + LENGTH - 1),
        patches=0,
        visual_tokens=0,
    )
    stages = [*decoder_stages(config, sizes, shape, numerics), head_stage(config, sizes, shape, numerics)]
    planned = sum(stage.saved for stage in (*stages, embedding_stage(sizes, shape, numerics)))
    assert planned == pytest.approx(meter.num_bytes, rel=0.03 if how == "none" else 0.12)


def test_experts_are_counted_as_weights() -> None:
    for family, experts in (("qwen3_vl", 0), ("qwen3_vl_moe", 3 * 4 * 3 * 64 * 128)):
        config = load_config([], [f"model.tiny.family={family}"])
        assert expert_weights(model_sizes(config)) == experts
