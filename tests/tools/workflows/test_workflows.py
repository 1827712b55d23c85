"""The workflows: inputs by name, what is said of wrong ones, and runs of their commands with tiny models."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from fovea.cli.main import app
from fovea.config.loading import load_config
from fovea.config.recipes import shipped_recipe
from fovea.config.run import Config
from fovea.metrics.log import read_metrics
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
from fovea_tools.workflows.training import final_reward, new_run, overrides_for
from gym_tests.tables import table
from tests.tools.workflows.small import SETTINGS, geospot_rows, model, vqa_rows

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
    evaluated = {"env_name", "trained_model", "baseline_model", "num_episodes", "settings"}
    assert evaluated == set(EvaluationInputs.model_fields)
    assert {name for name in TrainingInputs.model_fields if not keys_of(name)} == {"settings"}


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
        (f'{{"settings": {{"a": {"[" * 99}{"]" * 99}}}}}', "settings: is nested more than 50 levels deep, or holds"),
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
    # an input, and its setting beside it
    with pytest.raises(ConfigError, match=r"^gamma: .*\balgorithm\.advantage\.gamma\b"):
        settings_of(TrainingInputs(gamma=0.5, settings={"algorithm.advantage.gamma": 0.5}))


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


def test_the_default_of_num_episodes_gives_way_to_settings() -> None:
    """It would otherwise replace, without a word, a number that the user has given."""
    size = {"evaluate": {"test_size": 7}}
    inputs = EvaluationInputs(trained_model="run")
    assert overrides_for(inputs) == [{"evaluate": {"test_size": 100}}]
    for given in ({"evaluate.test_size": 7}, size):
        assert overrides_for(inputs.model_copy(update={"settings": given})) == [size]
    with pytest.raises(ConfigError, match=r"evaluate\.test_size"):
        overrides_for(EvaluationInputs(trained_model="run", num_episodes=5, settings={"evaluate.test_size": 7}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("workflows")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        model(folder / "model")
        yield folder


def invoke(workflow: str, **inputs: object) -> Result:
    return CliRunner().invoke(app, ["workflow", workflow, "--input", json.dumps(inputs)])


def outputs(workflow: str, **inputs: object) -> dict[str, Any]:
    """What stands on stdout, which must be JSON and nothing else."""
    done = invoke(workflow, **inputs)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Any]:
    given = {"env_name": "geospot", "model_name": "model", "env_dataset": str(geospot_rows(folder))}
    steps = {"total_steps": 6, "checkpoint_interval": 2, "ppo_epochs": 2, "curriculum_enabled": False}
    numbers = {"learning_rate": 1e-3, "clip_epsilon": 0.3, "value_coef": 0.25, "entropy_coef": 0.02, "gamma": 0.9}
    settings = SETTINGS | {"run_dir": "runs/geospot", "checkpoint.keep": 9}
    return outputs("vlm-rl-training", **given, **steps, **numbers, gae_lambda=0.8, settings=settings)


def config_of(run: str) -> Config:
    return load_config([Path(run) / "config.yaml"], [])


def test_the_outputs_are_those_of_the_published_page(trained: dict[str, Any]) -> None:
    metrics = read_metrics(Path(trained["run"]))
    assert trained["metrics_dataset"] == "runs/geospot/metrics.jsonl"
    assert (trained["total_steps"], trained["total_episodes"], len(metrics)) == (6, 3, 3)
    assert trained["final_reward"] == pytest.approx(sum(row["reward"] for row in metrics) / 3)
    assert trained["trained_model"] == "runs/geospot/checkpoints/step-3"
    assert trained["evaluation"]["final"]["accuracy"]["n"] == 2, "a tenth of 20 rows"
    assert set(trained) == {
        *("final_reward", "total_steps", "total_episodes", "metrics_dataset", "evaluation", "trained_model", "run")
    }


def test_a_resumed_run_goes_on_with_its_own_settings(trained: dict[str, Any]) -> None:
    before = read_metrics(Path("runs/geospot"))
    checkpoint = "runs/geospot/checkpoints/step-2"
    resumed = outputs("vlm-rl-training", resume_checkpoint=checkpoint, total_steps=8, learning_rate=5e-4)
    assert Path(resumed["run"]).samefile("runs/geospot")
    assert (resumed["total_steps"], resumed["total_episodes"]) == (8, 4)
    after = read_metrics(Path("runs/geospot"))
    assert [row["step"] for row in after] == [1, 2, 3, 4]
    assert after[:2] == before[:2], "the steps before the checkpoint are those of the first run"
    config = config_of("runs/geospot")
    assert (config.train.learning_rate, config.algorithm.ppo_epochs, config.max_steps) == (5e-4, 2, 4)


def test_the_trained_model_is_evaluated_beside_a_baseline(trained: dict[str, Any]) -> None:
    models = {"trained_model": trained["trained_model"], "baseline_model": "model"}
    found = outputs("vlm-rl-eval", env_name="geospot", **models, num_episodes=1)
    assert (found["env_name"], found["num_episodes"]) == ("geospot", 1)
    ours, baseline = found["trained_model"], found["baseline_model"]
    assert (ours["target"], baseline["target"]) == (trained["trained_model"], "model")
    assert {"reward", "accuracy", "parts"} < set(ours)
    assert (ours["versus_first"] is None, baseline["versus_first"]) == (False, None)


NOWHERE = {"model_name": "nowhere", "env_dataset": "nowhere.csv", "resume_checkpoint": "nowhere"}
CHANGED = {"env_name": "geospot", "env_dataset": "places.csv", "gamma": 0.1, "total_steps": 2, "model_name": "other"}
"""Inputs that a resumed run does not take."""


@table(
    ("workflow", "inputs", "message"),
    [
        *(("vlm-rl-training", {name: value}, f"{name}: ") for name, value in NOWHERE.items()),
        *(
            ("vlm-rl-training", {"resume_checkpoint": "runs/geospot", name: value}, f"{name}: ")
            for name, value in CHANGED.items()
        ),
        ("vlm-rl-eval", {"trained_model": "nowhere/at/all"}, "trained_model: "),
        ("vlm-rl-eval", {"trained_model": "runs/geospot", "baseline_model": "qwen2-vl"}, "baseline_model: "),
        ("vlm-rl-eval", {"trained_model": "runs/geospot", "env_name": "vqa"}, "env_name: "),
    ],
)
def test_an_error_of_a_run_names_the_input(
    workflow: str, inputs: dict[str, Any], message: str, trained: dict[str, Any]
) -> None:
    if "resume_checkpoint" not in inputs and workflow == "vlm-rl-training":
        inputs = {"env_dataset": "places.csv", "model_name": "model", "settings": SETTINGS} | inputs
    done = invoke(workflow, **inputs)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert f"error: {message}" in done.stderr


def test_visual_qa_goes_through_its_curriculum(folder: Path) -> None:
    settings = SETTINGS | {"run_dir": "runs/vqa", "curriculum.starts": [1, 2], "rollout.prompts_per_step": 4}
    inputs = {"env_name": "visual_qa", "model_name": "model", "env_dataset": str(vqa_rows(folder)), "total_steps": 8}
    trained = outputs("vlm-rl-training", **inputs, settings=settings)
    assert (trained["total_steps"], trained["total_episodes"]) == (8, 2)
    config = config_of("runs/vqa")
    assert (config.environment.name, config.curriculum.enabled, config.algorithm.name) == ("vqa", True, "ppo")
    kinds = [{key for key in row if key.startswith("accuracy/train/")} for row in read_metrics(Path("runs/vqa"))]
    assert kinds[0] == set(), "the first stage asks one kind of question"


def test_rows_of_other_types_than_the_curriculum_has_are_told_before_the_model_is_loaded(folder: Path) -> None:
    rows = vqa_rows(folder).read_text().splitlines()
    counting = [row for row in rows if json.loads(row)["type"] == "counting"]
    Path("counting.jsonl").write_text("\n".join(counting * 3))
    settings = SETTINGS | {"run_dir": "runs/counting", "data.on_bad_row": "skip"}
    inputs: dict[str, Any] = {"env_name": "vqa", "model_name": "model", "env_dataset": "counting.jsonl"}
    inputs |= {"total_steps": 2, "settings": settings}
    done = invoke("vlm-rl-training", **inputs)
    assert done.exit_code == 2
    assert "error: env_dataset: curriculum.level_weights names 'existence', but no row has that level" in done.stderr
    assert "loading the model" not in done.output
    assert not Path("runs/counting").exists()
    assert outputs("vlm-rl-training", **inputs, curriculum_enabled=False)["total_episodes"] == 1


def test_rows_that_are_named_twice_are_refused(folder: Path) -> None:
    settings = SETTINGS | {"environment.train_files": ["other.csv"]}
    done = invoke("vlm-rl-training", env_dataset="places.csv", settings=settings)
    assert "env_dataset: the input settings also sets environment.train_files, which is the same; remove" in done.stderr


def test_the_final_reward_is_the_mean_of_the_last_hundred_episodes() -> None:
    metrics = [{"step": float(step), "reward": float(step)} for step in range(1, 121)]
    assert [final_reward(rows) for rows in (metrics, metrics[:1], [])] == [(21 + 120) / 2, 1, None]


@pytest.mark.parametrize(("num_gpus", "processes", "workers"), [(4, 1, 4), (1, 1, None), (0, 1, None), (4, 4, None)])
def test_all_gpus_take_part_unless_the_settings_place_the_run(
    num_gpus: int, processes: int, workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Ray, or in the processes that torchrun has started."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert new_run(TrainingInputs(), None).config.cluster.gpus_per_node == workers
    placed = TrainingInputs(settings={"cluster.gpus_per_node": 3})
    assert new_run(placed, None).config.cluster.gpus_per_node == 3
