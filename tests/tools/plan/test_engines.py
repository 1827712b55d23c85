"""Plans of engines with weights of their own, and of Megatron, by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea_gym.errors import ConfigError
from fovea_tools.plan.engine import CACHE
from fovea_tools.plan.model_sizes import ModelSizes
from fovea_tools.plan.plan import RunPlan, advice_for, make_plan
from fovea_tools.plan.states import ENGINE
from gym_tests.tables import table
from tests.tools.plan.published import (
    FEW_PROMPTS,
    QWEN2_5_VL_7B,
    RECIPES,
    folder_of,
    published,
    sizes_of_published,
    with_words,
)

TOKEN_BYTES = 2 * 28 * 4 * 128 * 2
"""Of Qwen2.5-VL-7B: keys and values of 28 layers with 4 heads of 128 numbers, in bfloat16."""
GIB = 2**30
TWO = "rollout.engine.tensor_parallel_size=2"
APART = ("cluster.placement=disaggregated", "cluster.rollout_gpus=1")


def plan_of(tmp_path: Path, *words: str) -> tuple[RunPlan, ModelSizes, Config]:
    config, sizes = published(tmp_path, *words)
    return make_plan(config, sizes), sizes, config


def test_a_share_of_the_gpu_is_weights_and_the_rest_the_cache(tmp_path: Path) -> None:
    plan, sizes, _ = plan_of(tmp_path, "rollout.engine=vllm", "rollout.engine.gpu_memory_utilization=0.4")
    rollout, update, sync = plan.phases
    assert rollout.parts[ENGINE] == sync.parts[ENGINE] == 2 * sizes.parameters
    assert rollout.parts[CACHE] == int(0.4 * 80 * GIB) - 2 * sizes.parameters
    assert plan.room is not None
    assert plan.room.cache_tokens == rollout.parts[CACHE] // TOKEN_BYTES
    # asleep, and without its cache until the sync is over
    assert not {ENGINE, CACHE} & update.parts.keys()
    assert CACHE not in sync.parts
    # a bucket of 64 MiB, and the embedding that may fill it
    assert sync.parts["weights on their way"] == 2**26 + 2 * 152064 * 3584
    assert rollout.parts["optimizer"] == update.parts["optimizer"] > 0


def test_sglang_shares_what_the_trainer_leaves(tmp_path: Path) -> None:
    plan, sizes, _ = plan_of(tmp_path, "rollout.engine=sglang", "rollout.engine.gpu_memory_utilization=0.4")
    rollout = plan.phases[0].parts
    # without a reference model: free when SGLang starts is all but the shards of the policy
    free = 80 * GIB - rollout["parameters"] - rollout.get("reference model", 0)
    assert rollout[CACHE] == int(free * 0.4) - 2 * sizes.parameters


@pytest.mark.parametrize(
    ("words", "weights", "cache_tokens"),
    [
        (["rollout.engine=vllm", "rollout.engine.kv_cache_gib=4"], 1, 4 * GIB // TOKEN_BYTES),
        (["rollout.engine=sglang", "rollout.engine.max_total_tokens=50000"], 1, 50_000),
        (["rollout.engine=sglang", "rollout.engine.max_total_tokens=50000", "plan.gpu=cpu"], 1, 50_000),
        (["rollout.engine=sglang", "plan.gpu=cpu"], 1, 32_768),
        (["rollout.engine=vllm", "plan.gpu=cpu"], 1, GIB // TOKEN_BYTES),
        # two GPUs hold half of the weights and half of the heads each
        (["rollout.engine=vllm", "rollout.engine.kv_cache_gib=4", TWO, *APART], 2, 8 * GIB // TOKEN_BYTES),
    ],
)
def test_a_cache_of_a_set_size(words: list[str], weights: int, cache_tokens: int, tmp_path: Path) -> None:
    plan, sizes, _ = plan_of(tmp_path, *words)
    assert plan.room is not None
    assert plan.room.cache_tokens == cache_tokens
    is_set = "kv_cache_gib=" in words[1] or "max_total_tokens=" in words[1]
    assert plan.room.sized_to.startswith("rollout.engine." if is_set else "the default of rollout.engine.")
    assert plan.room.weights == 2 * sizes.parameters // weights
    # nothing is freed on a CPU
    assert (ENGINE in plan.phases[1].parts) == ("plan.gpu=cpu" in words)


@table("apart", [[], ["cluster.placement=disaggregated", "cluster.rollout_gpus=2"]])
def test_engines_that_would_share_gpus_are_refused(apart: list[str], tmp_path: Path) -> None:
    """As a run refuses them."""
    with pytest.raises(ConfigError, match=r"\btensor_parallel_size=2\b"):
        plan_of(tmp_path, "rollout.engine=vllm", TWO, *apart)


def test_gpus_of_their_own_hold_the_engine_alone(tmp_path: Path) -> None:
    apart = ["cluster.placement=disaggregated", "cluster.rollout_gpus=2"]
    plan, *_ = plan_of(tmp_path, "rollout.engine=vllm", "rollout.engine.gpu_memory_utilization=0.85", *apart)
    assert plan.phases[0].parts.keys() == {ENGINE, CACHE}
    assert plan.phases[0].total == pytest.approx(0.85 * 80 * GIB)


def test_servers_take_nothing_of_the_trainers(tmp_path: Path) -> None:
    words = ["rollout.engine=vllm_servers", "rollout.engine.servers=[http://host:1]", "rollout.engine.weights_dir=/w"]
    plan, *_ = plan_of(tmp_path, *words)
    assert plan.room is None
    assert not any({ENGINE, CACHE} & phase.parts.keys() for phase in plan.phases)
    assert plan.compute[0].seconds is None, "of servers that are not planned"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("share", [0.1, 0.94])
def test_what_is_advised_fits(engine: str, share: float, tmp_path: Path) -> None:
    """A share too small for the weights and one conversation, and one that leaves the trainer too little."""
    words = [f"rollout.engine={engine}", f"rollout.engine.gpu_memory_utilization={share}", FEW_PROMPTS]
    plan, _, config = plan_of(tmp_path, *words)
    assert not plan.fits
    advice = [each.settings for each in advice_for(config)]
    assert any("gpu_memory_utilization" in settings[0] for settings in advice)
    for changed in (with_words(config, settings) for settings in advice):
        assert make_plan(changed, sizes_of_published(changed)).fits


def test_the_command_names_the_setting(tmp_path: Path) -> None:
    path = f"model.path={folder_of(tmp_path, QWEN2_5_VL_7B)}"
    words = ["plan", str(RECIPES / "geo3k_qwen2_5_vl_7b.yaml"), path, "rollout.engine=vllm", FEW_PROMPTS]
    share = "rollout.engine.gpu_memory_utilization="
    sized = rf"has room for [\d,]+ tokens \([^)]*\); sized to {share}0\.\d"
    small = (
        rf"does not fit: the key-value cache has room for 0 tokens next to the engine's weights.*it fits with {share}"
    )
    for more, exit_code, verdict in (([], 0, sized), ([f"{share}0.1"], 1, small)):
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code == exit_code, done.output
        assert re.search(verdict, " ".join(done.stdout.split()))


BASE = [RECIPES / "geo3k_qwen2_5_vl_7b.yaml", RECIPES / "megatron_qwen2_5_vl.yaml"]
MATRIX = 152_064 * 3584
"""Numbers of the embedding, and of the head."""
LAYER = 233_057_792
"""Of a decoder layer: 28 heads and 4 of keys and values of 128, with biases, an MLP of 18,944, and two norms."""


def recipe(folder: Path, *words: str) -> Config:
    path = f"model.path={folder_of(folder, QWEN2_5_VL_7B)}"
    return load_config(BASE, [path, "plan.gpus=8", "plan.gpu=h100", FEW_PROMPTS, *words])


def test_states_of_a_split_policy_by_hand(tmp_path: Path) -> None:
    """8 GPUs in shares of 2: norms and tower whole, all else in halves; states over 4 shares, in the host's memory."""
    config = recipe(tmp_path)
    plan = make_plan(config)
    tower = plan.parameters - 2 * MATRIX - 28 * LAYER - 3584
    mine = tower + 3584 + (2 * MATRIX + 28 * (LAYER - 2 * 3584)) // 2 + 28 * 2 * 3584
    rollout, update, sync = plan.phases
    for phase in plan.phases:
        assert phase.parts["parameters"] == phase.parts["reference model"] == 2 * mine
        assert phase.parts["gradients"] == 4 * mine
        assert phase.parts["engine's weights"] == 2 * plan.parameters
    assert plan.on_host == {"optimizer": 12 * mine // 4}
    assert sync.parts["weights made whole"] == 2 * plan.parameters
    # 3 of 4 parts of the float32 gradients of each optimizer step, and of the weights after it
    trained = config.algorithm.minibatches * (4 + 2) * mine * 3 // 4
    # two sums in each layer and pass over two GPUs, each of which sends and receives half twice: of a share's 80
    # completions, each with its prompt, in two passes for log-probs, and forward and backward in the update
    stream = 64 * 5 // 4 * (1024 + 2047) * 3584 * 2
    assert plan.received_bytes == trained + 28 * (2 + 2) * 2 * stream
    assert rollout.parts["key-value cache"] == 262_144 * 2 * 28 * 4 * 128 * 2
    assert update.parts["activations"] > 0


def test_tokens_of_a_prompt_count_for_each_of_its_completions(tmp_path: Path) -> None:
    words = ["algorithm.kl=null", "algorithm.minibatches=1", "train.enable_dynamic_batch_size=false"]
    two, four = (
        make_plan(recipe(tmp_path, *words, f"rollout.samples_per_prompt={n}", "plan.completion_tokens=1"))
        for n in (2, 4)
    )
    # nothing but the prompts goes through the layers
    assert four.compute[-1].flops == pytest.approx(2 * two.compute[-1].flops)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("tensor_parallel_size=8", r"tensor_parallel_size=8\b.*\b28\b"),
        ("pipeline_parallel_size=3", r"=2 times pipeline_parallel_size=3\b.*\b8\b"),
        ("expert_parallel_size=2", r"expert_parallel_size=2\b.*\bqwen2_5_vl\b"),
    ],
)
def test_what_megatron_cannot_divide_is_refused(setting: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(recipe(tmp_path, f"train.backend.{setting}"))


def test_advice_splits_layers_over_more_gpus(tmp_path: Path) -> None:
    words = ["train.backend.tensor_parallel_size=1", "train.backend.sequence_parallel=false"]
    config = recipe(tmp_path, *words)
    assert not make_plan(config).fits
    settings = [each.settings for each in advice_for(config)]
    assert any("train.backend.tensor_parallel_size=2" in each for each in settings)
