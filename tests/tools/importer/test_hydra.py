"""Files that a `defaults` list names are composed as Hydra itself composes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fovea.config.base import leaves
from fovea.errors import ConfigError
from fovea.tools.importer.hydra import composed
from fovea.tools.importer.interpolation import Given
from fovea.tools.importer.reading import read

FILES = {
    "top.yaml": """
defaults:
  - data
  - actor@worker.actor: own
  - model/base@worker.model
  - optional model/extra: none_such
  - reward: null
  - log: [console, files]
  - /model: base
  - _self_
data:
  batch: 8
trainer: {steps: 3}
""",
    "data.yaml": "data: {batch: 4, files: [a, b]}\ntrainer: {steps: 1, nodes: 2}\n",
    "actor/own.yaml": """
defaults:
  - _self_
  - ../optim@optim: adam
  - base@_here_
  - placed@_global_.placed
lr: 1
optim: {lr: 5, eps: 1.0}
""",
    "actor/base.yaml": "clip: 0.2\nlr: 2\n",
    "actor/placed.yaml": "here: true\n",
    "optim/adam.yaml": "lr: 0.1\nbetas: [0.9, 0.95]\n",
    "model/base.yaml": "path: x\nlora: {rank: 4}\n",
    "log/console.yaml": "# @package _global_\nlogger: {console: true}\n",
    "log/files.yaml": "folder: out\n",
    "last.yaml": "defaults:\n  - data\n  - top\ntrainer: {nodes: 9}\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", ["top", "last", "data"])
def test_settings_are_those_of_hydra(folder: Path, name: str) -> None:
    with initialize_config_dir(str(folder), version_base="1.3"):
        theirs = OmegaConf.to_container(compose(name))
    assert isinstance(theirs, dict)
    found = composed(folder / f"{name}.yaml")
    assert {key: each.value for key, each in found.items()} == leaves(theirs)


ELSEWHERE = {
    "start/run.yaml": """
hydra:
  searchpath: [pkg://none.such, "file://${oc.env:FOVEA_TEST_CONFIGS}/more", file://base/config, gone]
defaults:
  - main
  - extra: own
  - _self_
data: {batch: 8}
""",
    "start/extra/own.yaml": "here: 1\n",
    "base/config/main.yaml": "defaults:\n  - extra: [own, their]\n  - _self_\ndata: {batch: 1, files: [a]}\nsteps: 3\n",
    "base/config/extra/own.yaml": "here: 2\n",
    "base/config/extra/their.yaml": "there: 3\n",
    "base/config/run.yaml": "never: read\n",
    "env/more/extra/their.yaml": "there: 4\n",
    "other/main.yaml": "steps: 5\n",
    "none.such/extra/their.yaml": "of: a folder, where a package is named\n",
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in ELSEWHERE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setenv("FOVEA_TEST_CONFIGS", str(tmp_path / "env"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hydras(folder: Path, name: str, *overrides: str) -> dict[str, object]:
    with initialize_config_dir(str(folder), version_base="1.3"):
        theirs = OmegaConf.to_container(compose(name, overrides=list(overrides)))
    assert isinstance(theirs, dict)
    return leaves(theirs)


def without_hydra(found: dict[str, Given]) -> dict[str, object]:
    return {key: each.value for key, each in found.items() if not key.startswith("hydra.")}


def test_folders_of_the_search_path_are_those_of_hydra(checkout: Path) -> None:
    """The folder of the file comes first, then those of the path, in their order; what is not there is passed over."""
    found = composed(checkout / "start" / "run.yaml")
    assert without_hydra(found) == hydras(checkout / "start", "run")
    assert (found["extra.here"].value, found["extra.there"].value) == (1, 4)
    assert found["steps"].where == "main.yaml"


def test_a_search_path_of_the_command_replaces_that_of_the_file(checkout: Path) -> None:
    words = ["--config-path=start", "--config-name=run", "hydra.searchpath=[other]"]
    Path("run.sh").write_text(f"python main.py {' '.join(words)}\n")
    found = without_hydra(read(["run.sh"]))
    assert found == hydras(checkout / "start", "run", "hydra.searchpath=[other]")
    assert found["steps"] == 5


def test_a_search_path_is_found_from_another_working_directory(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = without_hydra(composed(Path("start/run.yaml")))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert without_hydra(composed(checkout / "start" / "run.yaml")) == wanted
    (checkout / "base").rename(checkout / "away")
    assert composed(checkout / "start" / "run.yaml")["defaults"].value == ["main"]


def test_each_setting_names_its_file(folder: Path) -> None:
    found = composed(folder / "top.yaml")
    assert (found["worker.actor.optim.lr"].where, found["data.batch"].where) == ("optim/adam.yaml", "top.yaml")


def test_files_that_are_not_there_are_listed(tmp_path: Path) -> None:
    """As are the changes of a choice that stands in another file."""
    entries = "[ppo_trainer, {data@data: own}, {override hydra/job_logging: none}, {override model: big}, ../secret]"
    (tmp_path.parent / "secret.yaml").write_text("a: 1\n")
    (tmp_path / "run.yaml").write_text(f"defaults: {entries}\ntrainer: {{nnodes: 1}}\n")
    found = composed(tmp_path / "run.yaml")
    assert found["defaults"].value == ["ppo_trainer", "data/own@data", "override model/big", "../secret"]
    assert found.keys() == {"defaults", "trainer.nnodes"}


def test_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: [b]\n")
    (tmp_path / "b.yaml").write_text("defaults: [a]\n")
    with pytest.raises(ConfigError, match="name each other in a circle"):
        composed(tmp_path / "a.yaml")
    (tmp_path / "c.yaml").write_text("defaults: x\n")
    with pytest.raises(ConfigError, match=r'c\.yaml: defaults="x": Hydra takes a list of files'):
        composed(tmp_path / "c.yaml")
