"""The inputs of the workflows: names, values, and what is said of wrong ones."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fovea.config.loading import load_config
from fovea.config.recipes import shipped_recipe
from fovea_gym.errors import ConfigError, DataError, FoveaError
from fovea_gym.settings.environments import GeoSpotEnvironment, VqaEnvironment
from fovea_tools.workflows.inputs import (
    RECIPES,
    EvaluationInputs,
    TrainingInputs,
    errors_name_inputs,
    keys_of,
    read_inputs,
    settings_of,
)
from fovea_tools.workflows.training import new_run, overrides_for
from gym_tests.tables import table

PUBLISHED = {
    "env_name": "geospot",
    "model_name": "Qwen/Qwen2-VL-7B-Instruct",
    "total_steps": 10000,
    "learning_rate": 5e-7,
    "curriculum_enabled": True,
    "checkpoint_interval": 1000,
    "ppo_epochs": 4,
    "clip_epsilon": 0.2,
    "value_coef": 0.5,
    "entropy_coef": 0.01,
    "gamma": 0.99,
    "gae_lambda": 0.95,
}
"""The defaults of the published workflow, typed from its page."""


PUBLISHED_EPISODES = 625
"""`total_episodes` of its outputs, beside 10,000 `total_steps`."""
ANSWERS = 10_000 // PUBLISHED_EPISODES
"""Steps of an episode."""


@pytest.mark.parametrize("env_name", RECIPES)
def test_the_recipe_has_the_defaults_of_the_published_workflow(env_name: str) -> None:
    config = load_config([shipped_recipe(RECIPES[env_name])], [])
    gae, loss = config.algorithm.advantage, config.algorithm.loss
    assert (gae.name, loss.name) == ("gae", "clip")
    assert config.max_steps == PUBLISHED_EPISODES
    assert config.rollout.prompts_per_step * config.rollout.samples_per_prompt == ANSWERS
    last_interval = config.max_steps % config.checkpoint.every_steps
    assert (config.checkpoint.keep, last_interval > 0) == (config.max_steps // config.checkpoint.every_steps + 1, True)
    assert {
        "env_name": env_name,
        "model_name": config.model.path,
        "total_steps": ANSWERS * config.max_steps,
        "learning_rate": config.train.learning_rate,
        "curriculum_enabled": config.curriculum.enabled,
        "checkpoint_interval": 1000 if config.checkpoint.every_steps == math.ceil(1000 / ANSWERS) else None,
        "ppo_epochs": config.algorithm.ppo_epochs,
        "clip_epsilon": loss.clip_low,
        "value_coef": gae.critic.value_coef,
        "entropy_coef": config.algorithm.entropy_coef,
        "gamma": gae.gamma,
        "gae_lambda": gae.gae_lambda,
    } == PUBLISHED | {"env_name": env_name}
    assert loss.clip_high == loss.clip_low
    assert isinstance(config.environment, GeoSpotEnvironment if env_name == "geospot" else VqaEnvironment)


def test_the_environment_and_the_curriculum_are_those_of_the_published_tables() -> None:
    config = load_config([shipped_recipe("vlm_gym_geospot")], [])
    assert isinstance(config.environment, GeoSpotEnvironment)
    weights = config.environment.weights
    assert weights == {"country": 0.3, "region": 0.2, "city": 0.2, "coordinates": 0.3}
    assert config.environment.tolerances_km == (500, 200, 100, 50, 25)
    starts = tuple(math.ceil(start / ANSWERS) for start in (100, 300, 600, 1000))
    assert (config.curriculum.starts, config.curriculum.advance) == (starts, "step")


def test_every_input_reaches_its_setting() -> None:
    """One value each that no recipe has."""
    counts = {"total_steps": 31, "checkpoint_interval": 15, "ppo_epochs": 2}
    numbers = {"learning_rate": 3e-6, "clip_epsilon": 0.3, "value_coef": 0.25, "entropy_coef": 0.5, "gamma": 0.5}
    given = {**counts, **numbers, "gae_lambda": 0.75, "curriculum_enabled": False}
    inputs = TrainingInputs.model_validate(given | {"settings": {"rollout.prompts_per_step": 5}})
    config = new_run(inputs, None).config
    gae = config.algorithm.advantage
    assert gae.name == "gae"
    # 31 and 15 answers are 7 and 3 training steps of 5 answers each
    assert (config.max_steps, config.train.learning_rate, config.curriculum.enabled) == (7, 3e-6, False)
    assert (config.checkpoint.every_steps, config.algorithm.ppo_epochs) == (3, 2)
    assert (config.algorithm.loss.clip_low, config.algorithm.loss.clip_high) == (0.3, 0.3)  # type: ignore[union-attr]
    assert (gae.critic.value_coef, config.algorithm.entropy_coef, gae.gamma, gae.gae_lambda) == (0.25, 0.5, 0.5, 0.75)
    assert config.rollout.prompts_per_step == 5


def test_inputs_are_those_of_the_published_page_and_settings() -> None:
    """`settings` is the one input that is ours."""
    assert {*PUBLISHED, "env_dataset", "resume_checkpoint", "settings"} == set(TrainingInputs.model_fields)
    assert {"env_name", "trained_model", "baseline_model", "num_episodes", "settings"} == set(
        EvaluationInputs.model_fields
    )


def test_a_file_and_json_are_the_same(tmp_path: Path) -> None:
    text = json.dumps({"env_name": "geospot", "learning_rate": 5e-7, "total_steps": 100})
    (tmp_path / "in.json").write_text(text)
    assert read_inputs(TrainingInputs, str(tmp_path / "in.json")) == read_inputs(TrainingInputs, text)


@table(
    ("source", "message"),
    [
        ('{"learning_rat": 1}', "learning_rat: no such input; did you mean learning_rate?"),
        ('{"max_steps": 1}', "max_steps: no such input; did you mean total_steps?"),
        ('{"train.learning_rate": 1}', "train.learning_rate: no such input; did you mean learning_rate?"),
        ('{"num_episodes": 1}', "num_episodes: no such input; it is an input of vlm-rl-eval"),
        ('{"rollout.engine": 1}', 'rollout.engine: no such input; give a recipe setting as "settings": {"ro'),
        ('{"zzz": 1}', "zzz: no such input; the inputs are env_name, model_name, total_steps,"),
        ('{"env_name": "geosport"}', 'env_name: "geosport" does not fit; allowed: geospot | vqa | visual_qa'),
        ('{"total_steps": 0}', "total_steps: 0 does not fit; allowed: integer >= 1 or null"),
        ('{"total_steps": "10"}', 'total_steps: "10" does not fit; allowed: integer >= 1 or null; without the quotes'),
        ('{"learning_rate": -1}', "learning_rate: -1 does not fit; allowed: number > 0 or null"),
        ('{"curriculum_enabled": 1}', "curriculum_enabled: 1 does not fit; allowed: true or false or null"),
        ('{"gamma": 2}', "gamma: 2 does not fit; allowed: number >= 0 and <= 1 or null"),
        ('{"gamma": 1, "gamma": 1}', "gamma: given twice"),
        ('{"settings": 1}', "settings: 1 does not fit"),
        ('{"gamma": ', "--input line 1: not valid JSON"),
        (f'{{"settings": {"[" * 3000}{"]" * 3000}}}', "--input: nested too deeply for an object of inputs; flatten it"),
        (
            f'{{"settings": {{"a": {"[" * 99}{"]" * 99}}}}}',
            "settings: is nested more than 50 levels deep, or holds itself",
        ),
        (f'{{"total_steps": {"1" * 5000}}}', "--input: a number is too long (Exceeds the limit (4300 "),
        ("nowhere.json", "--input nowhere.json: cannot be read (No such file or directory)"),
    ],
)
def test_an_error_names_the_input(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        read_inputs(TrainingInputs, source)


def test_a_required_input_is_named(tmp_path: Path) -> None:
    """And a file without an object."""
    with pytest.raises(ConfigError, match=r"^trained_model: "):
        read_inputs(EvaluationInputs, "{}")
    (tmp_path / "in.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"\bin\.json: \[1\]"):
        read_inputs(TrainingInputs, str(tmp_path / "in.json"))


def test_an_input_and_its_setting_beside_it_are_refused() -> None:
    inputs = TrainingInputs(gamma=0.5, settings={"algorithm.advantage.gamma": 0.5})
    with pytest.raises(ConfigError, match=r"^gamma: .*\balgorithm\.advantage\.gamma\b"):
        settings_of(inputs)


@table(
    ("inputs", "error", "named"),
    [
        ({"env_dataset": "rows.csv"}, DataError("environment.train_files: no such file"), "env_dataset: "),
        ({"env_dataset": "rows.csv"}, DataError("environment.test_files: no such file"), ""),
        # which only mentions max_steps
        ({"total_steps": 5}, ConfigError("train.lr_warmup_steps=9 is more than max_steps=5"), ""),
    ],
)
def test_an_error_about_a_setting_names_the_input_that_is_given_for_it(
    inputs: dict[str, Any], error: FoveaError, named: str
) -> None:
    wanted = ConfigError if named else type(error)
    with pytest.raises(wanted, match=f"^{re.escape(f'{named}{error}')}$"), errors_name_inputs(TrainingInputs(**inputs)):
        raise error


def test_all_inputs_with_one_setting_are_in_the_table_of_other_systems() -> None:
    without = {name for name in TrainingInputs.model_fields if not keys_of(name)}
    assert without == {"settings"}


def test_the_default_of_num_episodes_gives_way_to_settings() -> None:
    """It would otherwise replace, without a word, a number that the user has given."""
    size = {"evaluate": {"test_size": 7}}
    inputs = EvaluationInputs(trained_model="run")
    assert overrides_for(inputs) == [{"evaluate": {"test_size": 100}}]
    for given in ({"evaluate.test_size": 7}, size):
        assert overrides_for(inputs.model_copy(update={"settings": given})) == [size]
    with pytest.raises(ConfigError, match=r"evaluate\.test_size"):
        overrides_for(EvaluationInputs(trained_model="run", num_episodes=5, settings={"evaluate.test_size": 7}))
