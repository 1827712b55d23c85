"""Values that a section refuses, and what it derives from others."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from fovea.config.algorithm import Algorithm, KlInLoss, KlInReward
from fovea.config.model import Lora, Model, TinyModel
from fovea.config.run import Config
from fovea.config.sections import Rollout, Train
from fovea_gym.settings.base import Section, Tree
from fovea_gym.settings.environments import Geo3kEnvironment, ShapesEnvironment
from gym_tests.tables import table

APART = {"placement": "disaggregated", "rollout_gpus": 1}
MIXED = {"name": "mixture", "parts": {"a": {"environment": {"name": "shapes"}}}}
JUDGE = {"url": "http://x/v1", "model": "m"}


def test_the_smallest_config_is_the_demo_model_on_shapes_and_frozen() -> None:
    config = Config(model=Model(tiny=TinyModel()))
    assert (config.environment, config.warmup, config.train.learning_rate) == (ShapesEnvironment(), None, 1e-6)
    with pytest.raises(ValidationError, match="frozen"):
        config.rollout.top_p = 0.5  # type: ignore[misc]


@table(
    ("section", "values", "message"),
    [
        (Rollout, {"samples_per_prompt": 0}, "should be greater than or equal to 1"),
        (Rollout, {"temperature": 0}, "should be greater than or equal to 0.000001"),
        (Rollout, {"top_p": 0}, "should be greater than 0"),
        (Rollout, {"min_p": 1.1}, "should be less than or equal to 1"),
        (Train, {"betas": (0.9, 1.0)}, "should be less than 1"),
        (Train, {"learning_rate": 0}, "should be greater than 0"),
        (ShapesEnvironment, {"level": 4}, "should be less than or equal to 3"),
        (ShapesEnvironment, {"text_share": 1.1}, "should be less than or equal to 1"),
        (Geo3kEnvironment, {"test_files": ["a"]}, r"train_files\n  Field required"),
        (TinyModel, {"vocabulary_size": 299}, "should be greater than or equal to 300"),
        (TinyModel, {"image_side_px": 15}, "should be greater than or equal to 16"),
        (TinyModel, {"num_heads": 3}, r"hidden_size=64 is not a multiple of 8 \* num_heads=24; .*=72"),
        (TinyModel, {"num_kv_heads": 3}, "num_heads=2 is not a multiple of num_kv_heads=3"),
        (TinyModel, {"family": "qwen3_vl_moe", "intermediate_size": 32}, "=32 are square.*set intermediate_size=40"),
        (Rollout, {"samples_per_prompt": 10**12}, "should be less than or equal to 131072"),
        (Rollout, {"prompts_per_step": 10**9}, "should be less than or equal to 131072"),
        (
            Rollout,
            {"prompts_per_step": 10**5, "samples_per_prompt": 100},
            "are 10,000,000 completions a step, more than",
        ),
        (Rollout, {"max_new_tokens": 10**12}, "should be less than or equal to 1048576"),
        (Lora, {"rank": 10**5}, "should be less than or equal to 8192"),
        (Train, {"adam_eps": 1e-300}, r"should be greater than or equal to 0\.0{29}1"),
        (Train, {"weight_decay": 1e9}, "should be less than or equal to 1000"),
        (Train, {"learning_rate": 1e9}, "should be less than or equal to 100"),
        (Train, {"max_grad_norm": 1e-300}, "should be greater than or equal to 0.000000000001"),
        (KlInLoss, {"coef": 1e300}, "should be less than or equal to 1000000"),
        (KlInReward, {"coef": 1e300}, "should be less than or equal to 1000000"),
        (Algorithm, {"entropy_coef": 1e300}, "should be less than or equal to 1000000"),
        (Config, {"model": {"tiny": {}}, "threads": 10**5}, "should be less than or equal to 1024"),
        (Config, {"model": {"tiny": {}}, "reward_timeout_seconds": 1e300}, "should be less than or equal to 100000000"),
        (TinyModel, {"hidden_size": 2**40}, "should be less than or equal to 16384"),
        (ShapesEnvironment, {"train_size": 10**12}, "should be less than or equal to 16777216"),
        (Model, {}, r"set exactly one of model\.path"),
        (Model, {"path": "folder", "tiny": {}}, r"set exactly one of model\.path"),
        (Model, {"path": "folder", "min_pixels": 2, "max_pixels": 1}, "min_pixels=2 is above max_pixels=1"),
    ],
)
def test_what_a_section_refuses(section: type[Section], values: Tree, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        section.model_validate(values)


def of_tiny(**settings: object) -> Config:
    return Config.model_validate({"model": {"tiny": {}}, **settings})


@table(
    ("settings", "message"),
    [
        (
            {"rollout": {"max_staleness_steps": 1}, "cluster": APART, "algorithm": {"old_logprobs": "trainer"}},
            r"max_staleness_steps=1 .*old_logprobs=trainer .* set it to engine, or",
        ),
        (
            {"algorithm": {"old_logprobs": "engine", "importance_sampling_fix": True}},
            "old_logprobs=engine makes equal;",
        ),
        ({"rollout": {"max_staleness_steps": 2}}, r"_steps=2 .*set cluster\.placement=disaggregated"),
        (
            {"rollout": {"max_staleness_steps": 2}, "cluster": {**APART, "placement": "hybrid"}},
            r"_steps=2 .*set cluster\.placement=disaggregated",
        ),
        ({"rollout": {"engine": {"decode_weights": "int8"}}}, r"set algorithm.importance_sampling_fix=true, or"),
        # and nothing else that follows from these
        ({"environment": MIXED, "second_opinion": "wrong", "judge": JUDGE}, "second_opinion overrules the rule of one"),
        ({"reward": [], "reward_weights": [1.0]}, re.escape("reward=[] names no function")),
    ],
)
def test_what_a_run_refuses_in_one_complaint(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        of_tiny(**settings)
    assert "; also: " not in str(caught.value)


def test_what_corrects_for_other_probabilities_is_allowed() -> None:
    stale = {"rollout": {"max_staleness_steps": 1}, "cluster": APART}
    assert of_tiny().algorithm.old_logprobs == "trainer"
    assert of_tiny(**stale, algorithm={"name": "ppo"}).algorithm.old_logprobs == "engine"
    weighed = {"importance_sampling_fix": True}
    assert of_tiny(**stale, algorithm=weighed).algorithm.old_logprobs == "trainer"
    of_tiny(rollout={"engine": {"decode_weights": "int8"}}, algorithm=weighed)


def test_the_vision_tower_trains_unless_frozen_or_behind_adapters() -> None:
    assert Model(path="folder").trains_vision
    assert not Model(path="folder", freeze_vision_tower=True).trains_vision
    assert not Model(path="folder", lora=Lora()).trains_vision
