"""What a plan counts for experts and for outputs of a rollout, against what autograd keeps and a rollout leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.models.recompute import Recompute, kept_bytes, recompute_activations
from fovea.models.vlm import VLM
from fovea.train.packing import pack_row
from fovea.train.update_metrics import ActivationMeter
from fovea_tools.plan.activations import Numerics, decoder_stages, embedding_stage, expert_weights, head_stage
from fovea_tools.plan.model_sizes import model_sizes
from fovea_tools.plan.plan import make_plan
from fovea_tools.plan.workload import RowShape
from tests.tiny_models import CPU, random_completions, renderer, save, tiny, user
from tests.tools.plan.published import wide

MID = {"hidden_size": 128, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
COMPLETIONS, LENGTH = 8, 40


@pytest.mark.parametrize("how", ["none", "selective"])
@pytest.mark.parametrize(
    "mlp",
    [
        {"family": "qwen3_vl", "intermediate_size": 384},
        {"family": "qwen3_vl_moe", "intermediate_size": 96},
        {"family": "qwen3_vl_moe", "intermediate_size": 256},
        {"family": "qwen3_5_moe", "intermediate_size": 256, "num_layers": 1},
    ],
    ids=["dense", "experts", "wide experts", "with a shared one"],
)
def test_the_activations_of_a_row_are_those_that_autograd_keeps(mlp: dict[str, object], how: Recompute) -> None:
    parts = tiny(**MID | mlp)  # type: ignore[arg-type]
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
    of_three_layers = 3 * 4 * 3 * 64 * 128
    for family, experts in (("qwen3_vl", 0), ("qwen3_vl_moe", of_three_layers), ("qwen3_5_moe", of_three_layers)):
        config = load_config([], [f"model.tiny.family={family}"])
        assert expert_weights(model_sizes(config)) == experts


PROMPTS, SAMPLES, LIMIT, DRAWN, PROMPT_TOKENS = 6, 4, 12, 10, 20


def config_of(prompts: int, reuse_gib: float, plan: dict[str, object], **sections: object) -> Config:
    plan = {"gpus": 1, "completion_tokens": DRAWN} | plan
    sizes = {"prompts_per_step": prompts, "samples_per_prompt": SAMPLES, "max_new_tokens": LIMIT}
    return Config.model_validate({"rollout": sizes | {"engine": {"reuse_gib": reuse_gib}}, "plan": plan, **sections})


@pytest.mark.parametrize(("missing", "kept"), [(0, True), (1, False)])
def test_outputs_are_counted_where_they_fit(missing: int, kept: bool, tmp_path: Path) -> None:
    """Reserved for the longest completions, and counted for the expected lengths."""
    parts = tiny("qwen3_vl", **wide("qwen3_vl"))
    text = parts.network.config.text_config
    model = {"path": str(save(parts, tmp_path)), "freeze_vision_tower": True}
    heads = (text.num_attention_heads + 2 * text.num_key_value_heads) * text.head_dim
    outputs = 4 * text.num_hidden_layers * (heads + 2 * text.hidden_size + 2 * text.intermediate_size)
    limit = PROMPTS * (PROMPT_TOKENS + SAMPLES * LIMIT) * outputs - missing
    plan = {"gpu": "cpu", "prompt_tokens": PROMPT_TOKENS, "image_tokens": 9}
    for phase in make_plan(config_of(PROMPTS, limit / 2**30, plan, model=model)).phases:
        expected = PROMPTS * (PROMPT_TOKENS + SAMPLES * (DRAWN - 1)) * outputs
        assert phase.parts.get("recorded outputs") == (expected if kept else None)


@pytest.mark.parametrize(
    ("how", "reuse_gib", "kept"),
    [("full", 2.0, True), ("none", 2.0, False), ("none", 300.0, True), ("selective", 300.0, False)],
)
def test_on_a_gpu_the_vision_graph_alone_is_counted(how: str, reuse_gib: float, kept: bool, tmp_path: Path) -> None:
    """Of blocks that are computed again it has the inputs, which fit where the rest would not."""
    folder = save(tiny("qwen3_vl", **wide("qwen3_vl"), vision_depth=24, vision_hidden_size=256), tmp_path)
    model, train = {"path": str(folder), "dtype": "bfloat16"}, {"gradient_checkpointing": how}
    plan = {"gpu": "h100", "prompt_tokens": 300, "image_tokens": 256}
    phases = make_plan(config_of(64, reuse_gib, plan, model=model, train=train)).phases
    assert not any("recorded outputs" in phase.parts for phase in phases)
    rollout, update = (phase.parts.get("vision", 0) for phase in phases[:2])
    patches = 64 * 256 * 4
    inputs = patches * 24 * 256 * 2
    assert (min(rollout, update) > inputs) is kept
