"""The workflows as MixFlow classes, run by the SDK's own `run` in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fovea.errors import ConfigError
from tests.workflows.small import SETTINGS, geospot_rows, model

mixtrain = pytest.importorskip("mixtrain", reason="the SDK of mixtrain has no release for this Python")
_introspect = pytest.importorskip("mixtrain._introspect")
from fovea.integrations.mixtrain import VLMRLEval, VLMRLTraining, on_all_gpus  # noqa: E402
from fovea.workflows.inputs import EvaluationInputs, TrainingInputs  # noqa: E402


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MIXTRAIN_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_flow_trains_on_a_dataset_and_its_model_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "model")
    frame = pd.read_csv(geospot_rows(tmp_path))
    frame["image_url"] = [str(tmp_path / name) for name in frame["image_url"]]
    inputs: dict[str, Any] = {
        "model_name": "model",
        "env_dataset": mixtrain.Dataset.from_pandas(frame),
        "total_steps": 2,
        "settings": SETTINGS | {"run_dir": "runs/places"},
        "save_results": False,
    }
    outputs = VLMRLTraining().run(inputs)
    assert (outputs["total_steps"], outputs["total_episodes"]) == (2, 4)
    assert isinstance(outputs["metrics_dataset"], mixtrain.Dataset)
    assert outputs["metrics_dataset"].name == "vlm-rl-metrics-step-2-places", "a name that a workspace takes"
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


def test_all_gpus_of_a_sandbox_take_part_unless_the_settings_place_the_run() -> None:
    inputs = TrainingInputs(total_steps=1)
    assert on_all_gpus(inputs, 4).settings == {"cluster.gpus_per_node": 4}
    assert on_all_gpus(inputs, 4).total_steps == 1
    assert on_all_gpus(inputs, 1) is inputs
    placed = TrainingInputs(settings={"cluster.rollout_gpus": 1})
    assert on_all_gpus(placed, 4) is placed
