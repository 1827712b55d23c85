"""The workflows as commands, with tiny models and files made on the spot: inputs and outputs by their names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from fovea.cli.main import app
from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.metrics.log import read_metrics
from fovea_tools.workflows.inputs import TrainingInputs
from fovea_tools.workflows.training import final_reward, new_run
from tests.tools.workflows.small import SETTINGS, geospot_rows, model, vqa_rows


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
    return outputs(
        "vlm-rl-training",
        env_name="geospot",
        model_name="model",
        env_dataset=str(geospot_rows(folder)),
        total_steps=6,
        learning_rate=1e-3,
        curriculum_enabled=False,
        checkpoint_interval=2,
        ppo_epochs=2,
        clip_epsilon=0.3,
        value_coef=0.25,
        entropy_coef=0.02,
        gamma=0.9,
        gae_lambda=0.8,
        settings=SETTINGS | {"run_dir": "runs/geospot", "checkpoint.keep": 9},
    )


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
    resumed = outputs(
        "vlm-rl-training", resume_checkpoint="runs/geospot/checkpoints/step-2", total_steps=8, learning_rate=5e-4
    )
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
    assert found["trained_model"]["target"] == trained["trained_model"]
    assert found["baseline_model"]["target"] == "model"
    assert {"reward", "accuracy", "parts"} < set(found["trained_model"])
    assert found["trained_model"]["versus_first"] is not None
    assert found["baseline_model"]["versus_first"] is None


@pytest.mark.parametrize(
    ("workflow", "inputs", "message"),
    [
        ("vlm-rl-training", {"model_name": "nowhere"}, "model_name: "),
        ("vlm-rl-training", {"env_dataset": "nowhere.csv"}, "env_dataset: "),
        ("vlm-rl-training", {"resume_checkpoint": "nowhere"}, "resume_checkpoint: "),
        ("vlm-rl-training", {"resume_checkpoint": "runs/geospot", "env_name": "geospot"}, "env_name: "),
        ("vlm-rl-training", {"resume_checkpoint": "runs/geospot", "env_dataset": "places.csv"}, "env_dataset: "),
        ("vlm-rl-training", {"resume_checkpoint": "runs/geospot", "gamma": 0.1}, "gamma: "),
        ("vlm-rl-training", {"resume_checkpoint": "runs/geospot", "total_steps": 2}, "total_steps: "),
        ("vlm-rl-training", {"resume_checkpoint": "runs/geospot", "model_name": "other"}, "model_name: "),
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
    assert done.exit_code == 2, done.output
    assert f"error: {message}" in done.stderr
    assert done.stdout == ""


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
    inputs: dict[str, Any] = {"env_name": "vqa", "model_name": "model", "env_dataset": "counting.jsonl"}
    settings = SETTINGS | {"run_dir": "runs/counting", "data.on_bad_row": "skip"}
    inputs |= {"total_steps": 2, "settings": settings}
    done = invoke("vlm-rl-training", **inputs)
    assert done.exit_code == 2
    assert "error: env_dataset: curriculum.level_weights names 'existence', but no row has that level" in done.stderr
    assert "loading the model" not in done.output
    assert not Path("runs/counting").exists()
    assert outputs("vlm-rl-training", **inputs, curriculum_enabled=False)["total_episodes"] == 1


def test_rows_that_are_named_twice_are_refused(folder: Path) -> None:
    files = {"environment.train_files": ["other.csv"]}
    done = invoke("vlm-rl-training", env_dataset="places.csv", settings=SETTINGS | files)
    assert (
        "env_dataset: the input settings also sets environment.train_files, which is the same; remove one"
        in done.stderr
    )


def test_the_final_reward_is_the_mean_of_the_last_hundred_episodes() -> None:
    metrics = [{"step": float(step), "reward": float(step)} for step in range(1, 121)]
    assert final_reward(metrics) == (21 + 120) / 2
    assert final_reward(metrics[:1]) == 1
    assert final_reward([]) is None


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
