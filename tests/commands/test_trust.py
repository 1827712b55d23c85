"""Folders of a stranger: code, pickles and templates are planted wherever something might run them, and nothing does.

Every trap makes one marker folder; `test_the_traps_work` shows that each kind would go off.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.checkpoint.filesystem import FileSystemReader
from typer.testing import CliRunner, Result

from fovea.cli.main import app
from fovea.commands.exporting.export import export
from fovea.commands.trust import check_trust
from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.loop import train
from fovea.run.checkpoint import write_manifest
from fovea.wiring.run import build
from fovea_gym.errors import FoveaError
from tests.tiny_models import save, tiny

SETTINGS: dict[str, Any] = {
    "threads": 1,
    "max_steps": 1,
    "environment": {"name": "shapes", "train_size": 16, "dev_size": 4, "test_size": 4},
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4},
    "evaluate": {"image_controls": False, "shared_images": "ignore"},
    "parity": {"prompts": 0},
    "log": {"tensorboard": False, "progress": False},
}
JINJA_ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__()[0].__init__.__globals__['os'].mkdir(%r) }}"
PICKLES = (
    *("pytorch_model.bin", "adapter_model.bin", "trainable.pt", "trainable_optimizer.pt", "rng_state.pth"),
    *("training_args.bin", ".metadata", "__0.metadata", "__0_0.distcp"),
)
SPRUNG = "import os; os.path.exists({0}) or os.mkdir({0})\n"
CODE = """
def score(task, text, images): return 1.0

class Tasks:
    def tasks(self, split): return []
    def prompt(self, task): return []
    def score(self, task, turns): return 1.0
    def target(self, task): return ""
"""


class Trap:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def fovea(*words: str) -> Result:
    return CliRunner().invoke(app, words, env={"COLUMNS": "400"})


def evaluated(folder: Path, *words: str, code: int | None = 0) -> str:
    """What `fovea eval` of a few rows says; None: with any exit code."""
    done = fovea("eval", str(folder), "evaluate.test_size=2", *words)
    assert code is None or done.exit_code == code, done.output
    return done.stderr


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an adapter on a base model, that model, and exports of the run both ways."""
    folder = tmp_path_factory.mktemp("made")
    base = save(tiny("qwen3_vl"), folder / "base")
    model = {"path": str(base), "lora": {"rank": 2}}
    train(build(Config.model_validate({**SETTINGS, "run_dir": str(folder / "run"), "model": model})))
    export(folder / "run", folder / "model")
    export(folder / "run", folder / "adapter", adapter_only=True)
    return folder


@pytest.fixture
def stranger(made: Path, tmp_path: Path) -> Path:
    """A copy of all of it that a test may spoil; the base model stays where it is."""
    return Path(shutil.copytree(made, tmp_path / "stranger"))


def plant_code(folder: Path, marker: Path) -> Path:
    """A Python file with a reward function and an environment, whose import goes off."""
    file = folder / "evil.py"
    file.write_text(SPRUNG.format(repr(str(marker))) + CODE)
    return file


def set_in(file: Path, **settings: object) -> None:
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | settings))


def plant_pickles(folder: Path, marker: Path) -> None:
    """In every folder below, under the names that libraries look for, and in place of every pickle that is there."""
    for place in {folder, *(path for path in folder.rglob("*") if path.is_dir())}:
        for name in PICKLES:
            (place / name).write_bytes(pickle.dumps(Trap(marker)))
    for file in folder.rglob("*.pt"):
        torch.save({"state": Trap(marker)}, file)


def plant_auto_map(folder: Path, marker: Path) -> None:
    """Python files beside a model that each of its configs asks to import."""
    (folder / "evil.py").write_text(SPRUNG.format(repr(str(marker))) + "class Evil: pass\n")
    kinds = ("Config", "Model", "ModelForImageTextToText", "Tokenizer", "Processor", "ImageProcessor")
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        file = folder / name
        values = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(values | {"auto_map": {f"Auto{kind}": "evil.Evil" for kind in kinds}}))


@pytest.mark.parametrize("setting", ["reward", "environment"])
def test_a_folder_that_is_evaluated_runs_no_code(setting: str, stranger: Path, marker: Path) -> None:
    name = "score" if setting == "reward" else "Tasks"
    for folder, recipe in ((stranger / "run", "config.yaml"), (stranger / "model", "recipe.yaml")):
        spec = f"{plant_code(folder, marker)}:{name}"
        set_in(folder / recipe, **{setting: spec})
        refused = evaluated(folder, code=2)
        told = f"{folder / recipe} runs the code of {setting}={spec}, but settings in a folder may not run code"
        assert told in refused
        assert len(refused.strip().splitlines()) == 1
        assert not marker.exists()
        evaluated(folder, "--trust", code=None)
        assert marker.exists(), "trusted for this command"
        marker.rmdir()
        evaluated(folder, code=2)  # and for no other


@pytest.mark.parametrize("setting", ["reward", "environment"])
def test_code_in_a_part_of_a_mixture_is_refused_too(setting: str, stranger: Path, marker: Path, tmp_path: Path) -> None:
    run, key = stranger / "run", f"environment.parts.second.{setting}"
    spec = f"{plant_code(run, marker)}:{'score' if setting == 'reward' else 'Tasks'}"
    scenes = SETTINGS["environment"]
    second = {"environment": scenes} | {setting: spec}
    set_in(run / "config.yaml", environment={"name": "mixture", "parts": {"first": {}, "second": second}})
    for words in ([], ["environment.parts.second.share=2"]):
        refused = evaluated(run, *words, code=2)
        assert f"config.yaml runs the code of {key}={spec}, but settings in a folder may not run code" in refused
        assert not marker.exists()
    (tmp_path / "mine.py").write_text(CODE)
    own = f"{key}={tmp_path / 'mine.py'}:score" if setting == "reward" else f"{key}=shapes"
    evaluated(run, own)
    assert not marker.exists()
    evaluated(run, "--trust", code=None)
    assert marker.exists()


def test_the_users_own_words_are_trusted(stranger: Path, marker: Path, tmp_path: Path) -> None:
    run = stranger / "run"
    set_in(run / "config.yaml", reward=f"{plant_code(run, marker)}:score")
    (tmp_path / "mine.py").write_text("def score(task, text, images): return 1.0\n")
    for word in ("reward=null", f"reward={tmp_path / 'mine.py'}:score"):
        evaluated(run, word)
    assert not marker.exists()
    recipe = tmp_path / "mine.yaml"
    recipe.write_text((stranger / "model" / "recipe.yaml").read_text())
    set_in(recipe, reward=f"{tmp_path / 'mine.py'}:score")
    evaluated(run, "--recipe", str(recipe))
    assert not marker.exists()


@pytest.mark.parametrize("setting", ["reward", "environment", "engine", "megatron"])
def test_a_workflow_that_goes_on_runs_no_code(setting: str, stranger: Path, marker: Path) -> None:
    run = stranger / "run"
    code = plant_code(run, marker)
    python = {"name": "vllm", "python": str(code)}
    changed: dict[str, Any] = {
        "reward": {"reward": f"{code}:score"},
        "environment": {"environment": f"{code}:Tasks"},
        "engine": {"rollout": SETTINGS["rollout"] | {"engine": python}},
        "megatron": {"train": {"backend": "megatron"}, "model": {"path": str(stranger / "base"), "dtype": "bfloat16"}},
    }[setting]
    set_in(run / "config.yaml", **changed)
    inputs = json.dumps({"resume_checkpoint": str(run), "total_steps": 2})
    refused = fovea("workflow", "vlm-rl-training", "--input", inputs)
    assert refused.exit_code == 2, refused.output
    assert "add --trust if the folder is your own" in refused.stderr
    assert not marker.exists()
    if setting == "reward":
        asked = json.dumps({"trained_model": str(run)})
        assert "add --trust" in fovea("workflow", "vlm-rl-eval", "--input", asked).stderr
        fovea("workflow", "vlm-rl-eval", "--input", asked, "--trust")
        assert marker.exists()


@pytest.mark.parametrize("key", ["SECRET", None])
def test_rows_and_keys_go_to_no_judge_of_a_folders(
    key: str | None, stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    judge = {"url": "http://127.0.0.1:9/v1", "model": "m", "api_key_env": key}
    set_in(stranger / "run" / "config.yaml", judge=judge, model_reward={"judge": 0.5})
    sent = "rows" if key is None else "the key in SECRET"
    refused = f"sends {sent} to judge.url=http://127.0.0.1:9/v1, but settings in a folder may"
    assert refused in evaluated(stranger / "run", code=2)
    file, own = stranger / "run" / "config.yaml", ["judge.url=http://127.0.0.1:8/v1"]
    check_trust(load_config([file], own), file, own, trust=False)


def test_a_folder_opens_no_private_network(stranger: Path) -> None:
    set_in(stranger / "run" / "config.yaml", data={"allow_private_addresses": True})
    refused = "lets rows reach this machine and private networks by data.allow_private_addresses=true"
    assert refused in evaluated(stranger / "run", code=2)
    for word in ("data.allow_private_addresses=true", "data.allow_private_addresses=false", "--trust"):
        evaluated(stranger / "run", word)


def test_an_export_runs_no_code(stranger: Path, marker: Path, tmp_path: Path) -> None:
    run = stranger / "run"
    set_in(run / "config.yaml", reward=f"{plant_code(run, marker)}:score")
    done = fovea("export", str(run), "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    # with a tiny model that is not there the rows would be asked for its tokenizer's texts
    set_in(run / "config.yaml", model={"tiny": {}}, environment=f"{run / 'evil.py'}:Tasks")
    shutil.rmtree(run / "model", ignore_errors=True)
    refused = fovea("export", str(run), "--out", str(tmp_path / "again"))
    assert refused.exit_code == 2, refused.output
    assert "runs the code of" in refused.stderr
    assert not marker.exists()
    fovea("export", str(run), "--out", str(tmp_path / "again"), "--trust")
    assert marker.exists()


@pytest.mark.parametrize("target", ["run", "model", "adapter"])
def test_no_pickle_and_no_auto_map_is_loaded(target: str, stranger: Path, marker: Path, tmp_path: Path) -> None:
    plant_pickles(stranger, marker)
    for checkpoint in (stranger / "run" / "checkpoints").glob("step-*"):
        # a stranger's checksums fit
        write_manifest(checkpoint)
    for folder in (stranger / "base", stranger / "model"):
        plant_auto_map(folder, marker)
    plant_code(stranger / "run", marker)
    own = {"model": {"path": str(stranger / "base"), "lora": {"rank": 2}}}
    set_in(stranger / "run" / "config.yaml", **own)
    for recipe in (stranger / "model" / "recipe.yaml", stranger / "adapter" / "recipe.yaml"):
        set_in(recipe, **own)
    adapter = stranger / "adapter" / "adapter_config.json"
    of_base = {"base_model_name_or_path": str(stranger / "base")}
    adapter.write_text(json.dumps(json.loads(adapter.read_text()) | of_base))
    evaluated(stranger / target)
    if target == "run":
        assert fovea("export", str(stranger / target), "--out", str(tmp_path / "out")).exit_code == 0
        assert fovea("report", str(stranger / target)).exit_code == 0
    assert not marker.exists()


def test_pickles_in_place_of_weights_are_refused(stranger: Path, marker: Path) -> None:
    for folder, name in (("model", "model.safetensors"), ("adapter", "adapter_model.safetensors")):
        (stranger / folder / name).unlink()
    plant_pickles(stranger, marker)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}}
    for folder in ("model", "adapter"):
        assert "safetensors" in evaluated(stranger / folder, code=2)
    (stranger / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    (stranger / "model" / "x.safetensors").write_bytes(pickle.dumps(Trap(marker)))
    evaluated(stranger / "model", code=2)
    assert not marker.exists()


@pytest.mark.parametrize("replaced", ["", "trainable", "trainable_optimizer"])
def test_a_resumed_run_loads_no_pickle(replaced: str, stranger: Path, marker: Path) -> None:
    """Planted beside the shards, where torch.distributed.checkpoint looks for one, and in place of shards."""
    plant_pickles(stranger / "run", marker)
    for checkpoint in (stranger / "run" / "checkpoints").glob("step-*"):
        for shards in (checkpoint / replaced).glob("*.safetensors") if replaced else ():
            shards.write_bytes(pickle.dumps(Trap(marker)))
        # a stranger's checksums fit
        write_manifest(checkpoint)
    settings = yaml.safe_load((stranger / "run" / "config.yaml").read_text())
    resumed = settings | {"run_dir": str(stranger / "run"), "resume": "auto", "max_steps": 2}
    with pytest.raises(FoveaError, match="checkpoint cannot be read") if replaced else nullcontext():
        train(build(Config.model_validate(resumed)))
    assert not marker.exists()


def test_an_adapter_imports_no_module(stranger: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft imports the module that `megatron_core` names, wherever Python finds it."""
    plant_code(stranger, marker)
    monkeypatch.syspath_prepend(str(stranger))
    file = stranger / "adapter" / "adapter_config.json"
    kept = json.loads(file.read_text())
    variants: list[dict[str, object]] = [{"megatron_config": {"a": 1}, "megatron_core": "evil"}, {"peft_type": "IA3"}]
    for keys in (*variants, {"arrow_config": {}}, {"new": []}):
        file.write_text(json.dumps(kept | keys))
        said = evaluated(stranger / "adapter", code=0 if "new" in keys else 2)
        assert not marker.exists()
        assert ("is a variant of LoRA that Fovea does not merge" in said) is ("new" not in keys)


def test_a_chat_template_stays_in_its_sandbox(stranger: Path, marker: Path) -> None:
    (stranger / "model" / "chat_template.jinja").write_text(JINJA_ESCAPE % str(marker))
    evaluated(stranger / "model", code=2)
    assert not marker.exists()


def test_the_traps_work(marker: Path, tmp_path: Path) -> None:
    """Each goes off where it is loaded without care."""

    def read_metadata() -> None:
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Trap(marker)))
        with pytest.raises(AttributeError):
            FileSystemReader(tmp_path).read_metadata()

    torch.save({"state": Trap(marker)}, tmp_path / "x.pt")
    for load in (
        lambda: pickle.loads(pickle.dumps(Trap(marker))),
        lambda: torch.load(tmp_path / "x.pt", weights_only=False),
        read_metadata,
    ):
        load()
        assert marker.exists()
        marker.rmdir()
