"""`defaults` lists, references of OmegaConf and scripts are read as Hydra, OmegaConf and bash read them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fovea_gym.errors import ConfigError
from fovea_gym.settings.base import leaves
from fovea_tools.importer.hydra import composed
from fovea_tools.importer.interpolation import Given, resolve
from fovea_tools.importer.reading import read
from fovea_tools.importer.shell import words_of

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


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write(tmp_path, ELSEWHERE)
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


@pytest.mark.parametrize("name", ["top", "last", "data"])
def test_settings_are_those_of_hydra(name: str, tmp_path: Path) -> None:
    found = composed(write(tmp_path, FILES) / f"{name}.yaml")
    assert {key: each.value for key, each in found.items()} == hydras(tmp_path, name)


def test_each_setting_names_its_file(tmp_path: Path) -> None:
    found = composed(write(tmp_path, FILES) / "top.yaml")
    assert (found["worker.actor.optim.lr"].where, found["data.batch"].where) == ("optim/adam.yaml", "top.yaml")


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


def test_files_that_are_not_there_are_listed(tmp_path: Path) -> None:
    """As are the changes of a choice that stands in another file."""
    entries = "[ppo_trainer, {data@data: own}, {override hydra/job_logging: none}, {override model: big}, ../secret]"
    (tmp_path.parent / "secret.yaml").write_text("a: 1\n")
    (tmp_path / "run.yaml").write_text(f"defaults: {entries}\ntrainer: {{nnodes: 1}}\n")
    found = composed(tmp_path / "run.yaml")
    assert found["defaults"].value == ["ppo_trainer", "data/own@data", "override model/big", "../secret"]
    assert found.keys() == {"defaults", "trainer.nnodes"}


def test_a_circle_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a.yaml": "defaults: [b]\n", "b.yaml": "defaults: [a]\n", "c.yaml": "defaults: x\n"})
    with pytest.raises(ConfigError, match="name each other in a circle"):
        composed(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match=r'\bc\.yaml: defaults="x": '):
        composed(tmp_path / "c.yaml")


VALUES = {
    "runner.seq_length": 8192,
    "data.max_prompt_length": 4096,
    "a.flag": True,
    "a.name": "x",
    "a.both": "${a.name}y",
}


@pytest.mark.parametrize(
    ("value", "resolved"),
    [
        ("${runner.seq_length}", 8192),
        ("${subtract:${runner.seq_length}, ${data.max_prompt_length}}", 4096),
        ("${int_div:${multiply:8, 64}, 4}", 128),
        ("${not:${a.flag}}", False),
        ("${oc.select:a.name,other}", "x"),
        ("${oc.select:a.missing,512}", 512),
        ("${.name}", "x"),
        ("${..a.name}/${a.name}", "x/x"),
        ("../results/${a.both}", "../results/xy"),
        ("no reference", "no reference"),
        (7, 7),
    ],
)
def test_a_reference_becomes_its_value(value: object, resolved: object) -> None:
    assert resolve(value, "a.key", VALUES.get) == resolved


def test_the_environment_gives_folders_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("A_KEY", "hunter2")
    values = ("${oc.env:HOME}/data", "${oc.env:A_KEY,none}", "${oc.env:NOT_SET_ANYWHERE}", "${oc.env:NOT_SET,3}")
    assert [resolve(value, "a.key", VALUES.get) for value in values] == ["/home/ann/data", "none", None, 3]
    assert resolve("${oc.env:A_KEY}", "a.key", VALUES.get, variables=None) == "hunter2", "where it is not shown"
    problem = r"^a\.key: \$\{oc\.env:A_KEY\}.*\ba\.key=VALUE\b"
    with pytest.raises(ConfigError, match=problem):
        resolve("${oc.env:A_KEY}", "a.key", VALUES.get)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${multiplied:2, 3}", r"\ba\.key: .*\bmultiplied\b"),
        ("${multiply:2}", "a.key: .* has no value"),
        ("${int_div:2, 0}", "a.key: .* has no value"),
        ("${a.circle}", "a.key: its references go in a circle"),
    ],
)
def test_a_reference_without_a_value_is_refused(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(value, "a.key", {"a.circle": "${a.circle}"}.get)


SCRIPTS = {
    "quotes": """a.b='x "y" $Z' a.c="q 'r'" a.d=[\\'console\\',\\'wandb\\']""",
    "line breaks": "a.b=1 \\\n  a.c=2 \\\n  a.d=3",
    "variables": 'ENGINE=vllm\nROOT="/data"; a.b=$ENGINE a.c=${ROOT}/x a.d="$ROOT"/y',
    "defaults": 'a.b=${1:-vllm} a.c=${NOT_SET_HERE:-"${ALSO_NOT:-deep}/model"} a.d=${NOT_SET-}',
    "sums": "LONGEST=$((1024 * 4))\na.b=$LONGEST a.c=$((LONGEST + 2048)) a.d=$(( ($LONGEST - 96) / 2 ))",
    "regular expressions": "a.b='.*visual.*' a.c=\\$name",
    "all arguments": "a.b=1 $@",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash to compare with")
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_words_are_those_of_bash(script: str) -> None:
    """The settings of a script, which bash prints one a line in the place of running a command with them."""
    lines = script.replace("\\\n", " ").splitlines()
    shown = [f"printf '%s\\n' {line}" if line.lstrip().startswith("a.b") else line for line in lines]
    shown = [line.replace("; a.b", "; printf '%s\\n' a.b") for line in shown]
    done = subprocess.run(["bash", "-c", "\n".join(shown)], capture_output=True, text=True, check=True)
    assert [word.text for word in words_of(script) if word.text.startswith("a.")] == done.stdout.splitlines()


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        (
            "set -x\n# a.b=0 is a remark\npython3 -m main \\\n  a.b=1 \\\n  a.c=2  # the last\n",
            [("a.b=1", 4), ("a.c=2", 5)],
        ),
        # settings of an array are read where it is written
        ('DATA=(\n  a.b=8\n)\npython3 -m main "${DATA[@]}" a.c=1\n', [("a.b=8", 2), ("a.c=1", 4)]),
    ],
)
def test_words_know_their_lines(script: str, lines: list[tuple[str, int]]) -> None:
    assert [(word.text, word.line) for word in words_of(script) if word.text.startswith("a.")] == lines


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("a.b=$NOT_SET_ANYWHERE", "$NOT_SET_ANYWHERE is set nowhere"),
        ("a.b=$A_KEY", "$A_KEY is set only in the environment, and a recipe must not show it"),
        ("a.b=$(nproc)", "$(nproc) is a command, and commands are not run"),
        ("a.b=`nproc`", "`nproc` is a command, and commands are not run"),
        ("if true; then N=1; else N=2; fi; a.b=$N", "$N is set to different values"),
        ("N=$(nproc)\na.b=$N", "$(nproc) is a command, and commands are not run"),
        ("a.b=$((2 ** 9))", "$((2 ** 9)) is not arithmetic of known integers"),
        ("a.b=${NAME//x/y}", "${NAME//x/y} is not a supported expansion"),
    ],
)
def test_what_only_running_it_would_tell_is_unread(script: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "hunter2")
    (word,) = (word for word in words_of(script) if word.text.startswith("a.b="))
    assert word.unread == reason
    assert "hunter2" not in word.text


def test_variables_of_a_script_give_folders_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("A_KEY", "hunter2")
    assert [word.text for word in words_of("a.b=$HOME/data a.c=${A_KEY:-none}")] == ["a.b=/home/ann/data", "a.c=none"]


@pytest.mark.parametrize("script", ["a.b='x", 'a.b="x', "a.b=${x", "a.b=$((1", "a.b=$(x", "a.b=\\", "a.b=$", "a.b=`x"])
def test_a_script_that_breaks_off_is_read_to_its_end(script: str) -> None:
    assert words_of(script)
