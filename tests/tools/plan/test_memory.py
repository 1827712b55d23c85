"""What a plan counts of memory, against what autograd keeps, a rollout leaves, and ranks and GPUs hold at most."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.models.recompute import Recompute, kept_bytes, recompute_activations
from fovea.models.tiny import TinyParts
from fovea.models.vlm import VLM
from fovea.train.packing import pack_row
from fovea.train.ranks import Ranks
from fovea.train.torch.policy import TorchPolicy, make_policy
from fovea.train.update_metrics import ActivationMeter
from fovea.types import Batch, Prompt, Sample, SampleGroup
from fovea.wiring.model import make_vlm
from fovea_gym.errors import ConfigError
from fovea_tools.families.tiny import KINDS, save_tiny_kind
from fovea_tools.plan.activations import Numerics, decoder_stages, embedding_stage, expert_weights, head_stage
from fovea_tools.plan.model_sizes import model_sizes
from fovea_tools.plan.plan import make_plan
from fovea_tools.plan.workload import RowShape
from tests.hub_models import Loaded, needs_image_processors
from tests.policies import make_batch
from tests.tiny_models import CORPUS, CPU, image, random_completions, renderer, save, tiny, user
from tests.tools.plan.published import QWEN3_VL_2B, folder_of, wide
from tests.tools.plan.saved import GROUPS, config_for, measured_and_planned, peak_of_update
from tests.warm import run_ranks

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


NUM_PROMPTS, SAMPLES, LIMIT, DRAWN, PROMPT_TOKENS = 6, 4, 12, 10, 20


def config_with(prompts: int, reuse_gib: float, plan: dict[str, object], **sections: object) -> Config:
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
    limit = NUM_PROMPTS * (PROMPT_TOKENS + SAMPLES * LIMIT) * outputs - missing
    plan = {"gpu": "cpu", "prompt_tokens": PROMPT_TOKENS, "image_tokens": 9}
    for phase in make_plan(config_with(NUM_PROMPTS, limit / 2**30, plan, model=model)).phases:
        expected = NUM_PROMPTS * (PROMPT_TOKENS + SAMPLES * (DRAWN - 1)) * outputs
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
    phases = make_plan(config_with(64, reuse_gib, plan, model=model, train=train)).phases
    assert not any("recorded outputs" in phase.parts for phase in phases)
    rollout, update = (phase.parts.get("vision", 0) for phase in phases[:2])
    patches = 64 * 256 * 4
    inputs = patches * 24 * 256 * 2
    assert (min(rollout, update) > inputs) is kept


TEXT = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 4}
VISION = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
TOLERANCES = dict.fromkeys(("internvl", "idefics3", "smolvlm", "mistral3", "glm4v", "glm4v_moe"), 0.1)
TOLERANCES["llava_onevision"] = 0.5
"""LLaVA-OneVision's visual tokens leave out the padding of tiles, and a plan counts whole tiles."""


def wide_kind(kind: str, folder: Path) -> Path:
    """A model whose activations are more than its rotary positions and statistics."""
    made = KINDS[kind]
    of_glm = {"out_hidden_size": 256, "num_heads": 4} if kind.startswith("glm4v") else {}
    with pytest.MonkeyPatch.context() as patch:
        # the dense first layer of GLM is planned as one of experts, which have about its width in published models
        of_experts = {"moe_intermediate_size": 256} if kind == "glm4v_moe" else {}
        text, vision = {**TEXT, **made.text, **of_experts}, {**VISION, **made.vision, **of_glm}
        patch.setitem(KINDS, kind, replace(made, text=text, vision=vision))
        return save_tiny_kind(kind, folder, CORPUS)


@needs_image_processors
@pytest.mark.parametrize("kind", TOLERANCES)
def test_saved_activations_are_those_that_autograd_keeps(kind: str, tmp_path: Path) -> None:
    loaded = Loaded.of(wide_kind(kind, tmp_path))
    vlm = VLM(loaded.network.train(), loaded.processor.banned_ids)
    prompts = [loaded.renderer.prompt(user(image(seed, 64, 64), "How many circles?")) for seed in range(GROUPS)]
    measured, planned = measured_and_planned(vlm, prompts, tmp_path)
    assert planned == pytest.approx(measured, rel=TOLERANCES[kind])
    config = config_for(tmp_path, prompts[0].num_tokens, prompts[0].images[0].num_tokens)
    sizes = model_sizes(config)
    assert sizes.parameters == sum(parameter.numel() for parameter in loaded.network.parameters())
    assert make_plan(config).compute[-1].flops > 0


@needs_image_processors
def test_a_family_without_a_fast_path_is_refused(tmp_path: Path) -> None:
    save_tiny_kind("gemma3", tmp_path, CORPUS)
    with pytest.raises(ConfigError, match=r"transformers' own forward, whose memory `fovea plan` cannot estimate; set"):
        model_sizes(config_for(tmp_path, 30, 9))


EQUAL_GROUPS = 6
TOLERANCE = 0.15
CASES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, LoRA": {"dtype": "bfloat16", "lora": {"rank": 4}},
}


def wide_model() -> TinyParts:
    return tiny("qwen3_vl", num_layers=12, **wide("qwen3_vl"))


def config_of(case: str, place: dict[str, Any], batch: Batch) -> Config:
    """A group to a micro-batch, of which each rank has three."""
    group = batch.groups[0]
    lengths = [len(sample.token_ids_T) for sample in group.samples]
    return Config.model_validate(
        {
            "model": {"device": "cpu", **CASES[case], **place},
            "train": {"enable_dynamic_batch_size": False, "groups_per_microbatch": 1},
            "rollout": {"prompts_per_step": 6, "samples_per_prompt": len(lengths), "max_new_tokens": max(lengths)},
            "plan": {
                **{"gpu": "cpu", "gpus": 2, "distinct_images": 1},
                "prompt_tokens": group.prompt.num_tokens,
                "image_tokens": group.prompt.images[0].num_tokens,
                "completion_tokens": round(sum(lengths) / len(lengths)),
            },
        }
    )


def batch_of(parts: TinyParts) -> Batch:
    """Equal groups, as a plan assumes."""
    return Batch(groups=make_batch(parts).groups[:1] * EQUAL_GROUPS)


def measured(case: str, ranks: Ranks) -> int:
    parts = wide_model()
    batch = batch_of(parts)
    config = config_of(case, {"tiny": {"family": "qwen3_vl"}}, batch)
    network = parts.network.to(getattr(torch, config.model.dtype))
    policy = make_policy(config, make_vlm(config, network, parts.processor.banned_ids), ranks=ranks)
    return peak_of_update(policy, batch)


def process(_: int, found: Path) -> None:
    torch.set_num_threads(1)
    # gloo copies what it sends, and frees the copies in its own threads, where the trace does not see it
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    ranks = Ranks.of_process_group("cpu")
    found.write_text(json.dumps({case: measured(case, ranks) for case in CASES}))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    found = tmp_path_factory.mktemp("ranks") / "peaks.json"
    run_ranks(process, (found,), nprocs=1)
    return dict(json.loads(found.read_text()))


@pytest.mark.parametrize("case", CASES)
def test_peak_of_an_update_on_two_ranks_is_the_measured_one(case: str, peaks: dict[str, int], tmp_path: Path) -> None:
    parts = wide_model()
    plan = make_plan(config_of(case, {"path": str(save(parts, tmp_path))}, batch_of(parts)))
    assert plan.microbatches == EQUAL_GROUPS / 2
    update = plan.phases[1]
    held = sum(update.parts.get(part, 0) for part in ("parameters", "optimizer", "engine's weights"))
    assert update.total - held == pytest.approx(peaks[case], rel=TOLERANCE)


def equal_groups(prompts: int, samples: int, prompt_tokens: int, completion_tokens: int) -> Batch:
    ids_L, ids_T = np.full(prompt_tokens, 7), np.full(completion_tokens, 9)
    sample = Sample(
        token_ids_T=ids_T,
        mask_T=np.ones(len(ids_T), np.bool_),
        rollout_logprobs_T=np.full(len(ids_T), -5, np.float32),
        reward=0.0,
        weight=1e-3,
        advantages_T=np.ones(len(ids_T), np.float32),
    )
    prompt = Prompt(token_ids_L=ids_L, unexpanded_ids_U=ids_L)
    return Batch(groups=(SampleGroup(prompt=prompt, samples=(sample,) * samples),) * prompts)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["none", "full"])
def test_an_update_of_2b_parameters_in_bfloat16(how: str, tmp_path: Path) -> None:
    """Against CUDA's own count."""
    config = Config.model_validate(
        {
            "model": {"path": str(folder_of(tmp_path, QWEN3_VL_2B)), "dtype": "bfloat16"},
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 256},
            "plan": {"gpu": "h100", "gpus": 1, "prompt_tokens": 512, "images_per_prompt": 0},
            "train": {"max_tokens_per_microbatch": 4096, "gradient_checkpointing": how},
        }
    )
    with torch.device("cuda"):
        network = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**QWEN3_VL_2B)).to(torch.bfloat16)
    recompute_activations(network, config.train.gradient_checkpointing)
    settings: dict[str, Any] = {"train": config.train, "algorithm": config.algorithm}
    policy = TorchPolicy(VLM(network, banned_ids=(0,)), **settings, temperature=1.0, max_steps=9)
    batch = equal_groups(4, 4, prompt_tokens=512, completion_tokens=256)
    policy.update(batch)
    torch.cuda.reset_peak_memory_stats()
    policy.update(batch)
    update = make_plan(config).phases[1]
    # no engine runs here, whose pool of keys would stay
    planned = update.total - update.parts.get("key-value cache", 0)
    assert planned == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.15)
