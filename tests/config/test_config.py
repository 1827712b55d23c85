from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from fovea.config.environments import Geo3kEnvironment, ShapesEnvironment
from fovea.config.model import Lora, Model, TinyModel
from fovea.config.run import Config
from fovea.config.sections import Rollout, Train


def test_the_smallest_config_is_the_demo_model_on_shapes() -> None:
    config = Config(model=Model(tiny=TinyModel()))
    assert config.environment == ShapesEnvironment()
    assert config.warmup is None
    assert config.train.learning_rate == 1e-6


def test_nothing_writes_to_a_config() -> None:
    config = Config(model=Model(path="folder"))
    with pytest.raises(ValidationError, match="frozen"):
        config.rollout.top_p = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (Rollout, {"samples_per_prompt": 0}),
        (Rollout, {"temperature": 0}),
        (Rollout, {"top_p": 0}),
        (Rollout, {"min_p": 1.1}),
        (Train, {"betas": (0.9, 1.0)}),
        (Train, {"learning_rate": 0}),
        (ShapesEnvironment, {"level": 4}),
        (ShapesEnvironment, {"text_share": 1.1}),
        (Geo3kEnvironment, {"test_files": ["a"]}),
        (TinyModel, {"vocabulary_size": 299}),
    ],
)
def test_values_out_of_range_are_refused(section: type[Rollout], values: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as caught:
        section(**values)  # type: ignore[arg-type]
    assert "extra_forbidden" not in [problem["type"] for problem in caught.value.errors()], "a setting of another name"


@pytest.mark.parametrize("values", [{}, {"path": "folder", "tiny": {}}])
def test_a_model_has_one_source(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"set exactly one of model\.path"):
        Model.model_validate(values)


def test_pixel_bounds_are_in_order() -> None:
    with pytest.raises(ValidationError, match="min_pixels=2 is above max_pixels=1"):
        Model(path="folder", min_pixels=2, max_pixels=1)


def test_the_vision_tower_trains_unless_frozen_or_behind_adapters() -> None:
    assert Model(path="folder").trains_vision
    assert not Model(path="folder", freeze_vision_tower=True).trains_vision
    assert not Model(path="folder", lora=Lora()).trains_vision


def test_heads_fill_the_width_of_a_tiny_model() -> None:
    assert TinyModel(num_heads=4).head_dim == 16
    with pytest.raises(ValidationError, match=r"hidden_size=64 is not a multiple of 8 \* num_heads=24; .*=72"):
        TinyModel(num_heads=3)


def test_query_heads_are_a_multiple_of_key_heads() -> None:
    with pytest.raises(ValidationError, match="num_heads=2 is not a multiple of num_kv_heads=3"):
        TinyModel(num_kv_heads=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"family": "qwen3_vl_moe", "intermediate_size": 32},
            r"hidden_size=64 and intermediate_size=32 are square.*set intermediate_size=40",
        ),
        ({"image_side_px": 15}, "greater than or equal to 16"),
    ],
)
def test_a_tiny_model_that_cannot_be_built_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TinyModel.model_validate(settings)


def test_stale_completions_are_corrected_for_by_default() -> None:
    apart = {"placement": "disaggregated", "rollout_gpus": 1}
    stale = {"model": {"tiny": {}}, "rollout": {"max_staleness_steps": 1}, "cluster": apart}
    assert Config.model_validate({"model": {"tiny": {}}}).algorithm.old_logprobs == "trainer"
    assert Config.model_validate(stale | {"algorithm": {"name": "ppo"}}).algorithm.old_logprobs == "engine"
    weighed = Config.model_validate(stale | {"algorithm": {"importance_sampling_fix": True}}).algorithm
    assert weighed.old_logprobs == "trainer"
    with pytest.raises(ValidationError, match=r"max_staleness_steps=1 .*old_logprobs=trainer .* set it to engine, or"):
        Config.model_validate(stale | {"algorithm": {"old_logprobs": "trainer"}})


def test_weights_that_would_all_be_1_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"old_logprobs=engine makes the same; leave either out"):
        Config.model_validate(
            {"model": {"tiny": {}}, "algorithm": {"old_logprobs": "engine", "importance_sampling_fix": True}}
        )


@pytest.mark.parametrize("cluster", [{}, {"placement": "hybrid", "rollout_gpus": 1}], ids=["collocated", "hybrid"])
def test_rollouts_during_updates_need_gpus_of_their_own(cluster: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"max_staleness_steps=2 .*set cluster\.placement=disaggregated"):
        Config.model_validate({"model": {"tiny": {}}, "rollout": {"max_staleness_steps": 2}, "cluster": cluster})


def test_inexact_decoding_needs_its_correction() -> None:
    settings = {"model": {"tiny": {}}, "rollout": {"engine": {"decode_weights": "int8"}}}
    with pytest.raises(ValidationError, match=r"set algorithm.importance_sampling_fix=true, or"):
        Config.model_validate(settings)
    Config.model_validate(settings | {"algorithm": {"importance_sampling_fix": True}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {
                "environment": {"name": "mixture", "parts": {"a": {"environment": {"name": "shapes"}}}},
                "second_opinion": "wrong",
                "judge": {"url": "http://x/v1", "model": "m"},
            },
            "second_opinion overrules the rule of one environment",
        ),
        ({"reward": [], "reward_weights": [1.0]}, "reward=[] names no function"),
    ],
)
def test_a_complaint_that_follows_from_another_is_left_out(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)) as caught:
        Config.model_validate({"model": {"tiny": {}}, **settings})
    assert "; also: " not in str(caught.value)
