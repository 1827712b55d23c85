"""The workflows as MixFlow classes, run by the SDK's own `run` in this process."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from packaging.requirements import Requirement

from fovea.config.loading import load_config
from fovea.config.recipes import shipped_recipe
from fovea_gym.errors import ConfigError
from tests.runs import ROOT
from tests.tools.workflows.mixtrain_platform import platform
from tests.tools.workflows.small import SETTINGS, geospot_rows, model

mixtrain = pytest.importorskip("mixtrain", reason="the SDK of mixtrain has no release for this Python")
_introspect = pytest.importorskip("mixtrain._introspect")
sdk_checkpoint = pytest.importorskip("mixtrain.types._checkpoint")
from mixtrain.cli.utils import expand_file_args  # noqa: E402

from fovea_tools.workflows import mixtrain as ours  # noqa: E402
from fovea_tools.workflows.inputs import RECIPES, EvaluationInputs, TrainingInputs  # noqa: E402
from fovea_tools.workflows.mixtrain import IMAGE, VLMRLEval, VLMRLTraining  # noqa: E402


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MIXTRAIN_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Inputs of a run of two training steps, in a folder with its model."""
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "model")
    frame = pd.read_csv(geospot_rows(tmp_path))
    frame["image_url"] = [str(tmp_path / name) for name in frame["image_url"]]
    return {"model_name": "model", "env_dataset": mixtrain.Dataset.from_pandas(frame), "total_steps": 4}


def test_a_flow_trains_on_a_dataset_and_its_model_is_evaluated(inputs: dict[str, Any]) -> None:
    settings = SETTINGS | {"run_dir": "runs/places"}
    outputs = VLMRLTraining().run(inputs, settings=settings, save_results=False)
    assert (outputs["total_steps"], outputs["total_episodes"]) == (4, 2)
    assert isinstance(outputs["metrics_dataset"], mixtrain.Dataset)
    assert outputs["metrics_dataset"].name == "vlm-rl-metrics-step-4-places", "a name that a workspace takes"
    assert outputs["metrics_dataset"].to_pandas()["step"].tolist() == [1, 2]
    assert outputs["evaluation"]["final"]["accuracy"]["n"] == 2
    evaluated = VLMRLEval().run(trained_model=outputs["run"], baseline_model="model", num_episodes=2)
    assert evaluated["num_episodes"] == 2
    assert evaluated["trained_model"]["accuracy"]["mean"] == outputs["evaluation"]["final"]["accuracy"]["mean"]
    json.dumps(evaluated)


def test_pictures_of_a_dataset_are_read_through_the_sdk(tmp_path: Path) -> None:
    geospot_rows(tmp_path, size=1)
    picture = mixtrain.Image.from_file(str(tmp_path / "0.png"))
    dataset = mixtrain.Dataset.from_pylist([{"image": picture, "country": "France"}])
    (row,) = VLMRLTraining()._rows(dataset) or []
    assert row == {"image": (tmp_path / "0.png").read_bytes(), "country": "France"}


@pytest.mark.parametrize(("flow", "record"), [(VLMRLTraining, TrainingInputs), (VLMRLEval, EvaluationInputs)])
def test_the_sdk_finds_the_inputs(flow: type, record: type) -> None:
    found = _introspect.build_spec(flow)["inputs"]
    assert set(found) - {"save_results"} == set(record.model_fields)  # type: ignore[attr-defined]
    assert found["env_name"]["type"] == "enum"
    assert [option["value"] for option in found["env_name"]["options"]] == ["geospot", "vqa", "visual_qa"]
    if flow is VLMRLTraining:
        types = {"total_steps": "int", "learning_rate": "float", "curriculum_enabled": "bool", "save_results": "bool"}
        assert {name: found[name]["type"] for name in types} == types
    else:
        assert [name for name, each in found.items() if each["required"]] == ["trained_model"]


@pytest.mark.parametrize(
    ("flow", "inputs", "message"),
    [
        (VLMRLTraining, {"learning_rat": 1.0}, "^learning_rat: no such input; did you mean learning_rate"),
        (VLMRLTraining, {"save_result": True}, "^save_result: no such input; did you mean save_results"),
        (VLMRLTraining, {"total_steps": 0, "save_results": False}, "^total_steps: 0 does not fit"),
        (VLMRLEval, {"trained": "m"}, "^trained: no such input; did you mean trained_model"),
        (VLMRLEval, {"trained_model": "nowhere/at/all"}, "^trained_model: nowhere/at/all"),
    ],
)
def test_an_error_names_the_input(flow: type, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flow().run(**inputs)


def test_without_an_account_a_run_that_is_to_be_saved_ends_before_training() -> None:
    with pytest.raises(Exception, match=r"(?i)authenticat|login"):
        VLMRLTraining().run(total_steps=1)


def test_results_are_saved_in_the_workspace(
    inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the SDK, in an Iceberg catalog on this disk; the run and its model are on the volume."""
    volume = tmp_path / "volume"
    volume.mkdir()
    monkeypatch.setattr(ours, "VOLUME", volume)
    monkeypatch.setattr(sdk_checkpoint, "_DATA_ROOT", str(volume))
    with platform(tmp_path) as asked:
        monkeypatch.setenv("MIXTRAIN_PLATFORM_URL", asked.url)
        monkeypatch.setenv("MIXTRAIN_API_KEY", "mix-key")
        outputs = VLMRLTraining().run(inputs, settings=SETTINGS)
        metrics, held_out = (
            mixtrain.Dataset(name).to_pylist()
            for name in (outputs["metrics_dataset"].name, asked.evaluation["config"]["datasets"][0]["dataset"])
        )
    assert Path(outputs["run"]).parent == volume / "fovea", "it outlives the sandbox, with its checkpoints"
    assert [row["step"] for row in metrics] == [1, 2]
    final = {row["figure"]: row for row in held_out if row["stage"] == "final"}
    summary = json.loads((Path(outputs["run"]) / "summary.json").read_text())
    expected = summary["test"]["final"]["accuracy"]
    assert {key: final["accuracy"][key] for key in expected} == expected
    assert {row["stage"] for row in held_out} == {"before", "final"}
    assert asked.evaluation["name"] == outputs["evaluation"].name
    checkpoint = outputs["checkpoint"]
    assert isinstance(checkpoint, mixtrain.Checkpoint)
    assert (checkpoint.format, checkpoint.task) == ("transformers", "image-text-to-text")
    assert (Path(checkpoint.path) / "model.safetensors").is_file()


def test_a_run_folder_of_the_settings_and_that_of_a_resumed_run_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed, resumed = TrainingInputs(settings={"run_dir": "runs/a"}), TrainingInputs(resume_checkpoint="runs/a")
    monkeypatch.setattr(ours, "VOLUME", tmp_path)
    assert [ours.on_volume(each) for each in (placed, resumed)] == [placed, resumed]
    assert ours.on_volume(TrainingInputs()).settings == {"run_dir": f"{tmp_path}/fovea/{{name}}-{{time}}"}
    monkeypatch.setattr(ours, "VOLUME", tmp_path / "absent")
    assert ours.on_volume(TrainingInputs()) == TrainingInputs()


@pytest.mark.parametrize("recipe", sorted(set(RECIPES.values())))
def test_a_run_ends_by_itself_before_its_sandbox_does(recipe: str) -> None:
    """With time for the start, the last step, the evaluation and the model."""
    max_hours = load_config([shipped_recipe(recipe)], []).max_hours
    assert max_hours is not None
    assert VLMRLTraining._sandbox["timeout"] - 3600 * max_hours >= 1800


def test_the_image_has_a_torch_that_fovea_takes() -> None:
    (needed,) = (Requirement(each) for each in requires("fovea-rl") or () if re.match(r"torch\b", each))
    version = re.match(r"pytorch/pytorch:([0-9.]+)-cuda", IMAGE)
    assert version is not None
    assert version[1] in needed.specifier


FILES = ROOT / "workflows" / "mixtrain"


@pytest.mark.parametrize(("name", "flow"), [("vlm_rl_training", "VLMRLTraining"), ("vlm_rl_eval", "VLMRLEval")])
def test_the_sdk_finds_the_workflow_of_each_file(name: str, flow: str) -> None:
    found = runpy.run_path(str(FILES / f"{name}.py"))
    classes = [each for each in found.values() if isinstance(each, type) and issubclass(each, mixtrain.MixFlow)]
    assert [each.__name__ for each in classes] == [flow]


@pytest.mark.slow
def test_the_requirements_install_the_wheels_beside_them(tmp_path: Path) -> None:
    """From any working directory, as pip reads them; the SDK uploads all that stands there."""
    for file in FILES.glob("*.*"):
        shutil.copy(file, tmp_path)
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    for folder in (ROOT / "gym", ROOT / "tools", ROOT):
        command = [sys.executable, "-c", build, str(tmp_path)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
    wheels = {file.name for file in tmp_path.glob("*.whl")}
    (version,) = {name.split("-")[1] for name in wheels}
    assert {name.split("-")[0] for name in wheels} == {"fovea_rl", "fovea_rl_gym", "fovea_rl_tools"}
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-deps", "--ignore-installed"]
    pip += ["-r", str(tmp_path / "requirements.txt")]
    done = subprocess.run(pip, cwd="/", check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"Would install fovea-rl-{version}" in done.stdout
    uploaded = expand_file_args([str(file) for file in sorted(tmp_path.iterdir())])
    assert wheels <= {Path(file).name for file in uploaded}
