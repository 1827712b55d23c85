"""Plans of Megatron by hand; tests/train/megatron/test_plan.py compares them with what its processes hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea_gym.errors import ConfigError
from fovea_tools.plan.plan import advice_for, make_plan
from tests.tools.plan.published import FEW_PROMPTS, QWEN2_5_VL_7B, RECIPES, folder_of

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
        ("train.backend.tensor_parallel_size=8", r"tensor_parallel_size=8\b.*\b28\b"),
        ("train.backend.pipeline_parallel_size=3", r"=2 times pipeline_parallel_size=3\b.*\b8\b"),
        ("train.backend.expert_parallel_size=2", r"expert_parallel_size=2\b.*\bqwen2_5_vl\b"),
    ],
)
def test_what_megatron_cannot_divide_is_refused(setting: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(recipe(tmp_path, setting))


def test_advice_splits_layers_over_more_gpus(tmp_path: Path) -> None:
    words = ["train.backend.tensor_parallel_size=1", "train.backend.sequence_parallel=false"]
    config = recipe(tmp_path, *words)
    assert not make_plan(config).fits
    settings = [each.settings for each in advice_for(config)]
    assert any("train.backend.tensor_parallel_size=2" in each for each in settings)
