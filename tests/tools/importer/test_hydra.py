"""`defaults` lists, references of OmegaConf and scripts as Hydra, OmegaConf and bash read them; settings elsewhere."""

from __future__ import annotations

import ast
import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fovea.config.describe import describe, unknown_key
from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.metrics.names import definition_of
from fovea_gym.errors import ConfigError
from fovea_gym.settings.base import leaves
from fovea_tools.importer.elsewhere import BELOW, Counterpart, systems
from fovea_tools.importer.hydra import composed
from fovea_tools.importer.interpolation import Given, resolve
from fovea_tools.importer.reading import read
from fovea_tools.importer.shell import words_of
from gym_tests.tables import table

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


@table("name", ["top", "last", "data"])
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


VALUES = {"runner.seq_length": 8192, "data.max_prompt_length": 4096, "a.flag": True, "a.name": "x"}
VALUES["a.both"] = "${a.name}y"


@table(
    ("value", "resolved"),
    [
        ("${runner.seq_length}", 8192),
        ("${subtract:${runner.seq_length}, ${data.max_prompt_length}}", 4096),
        ("${int_div:${multiply:8, 64}, 4}", 128),
        ("${not:${a.flag}}", False),
        *(("${oc.select:a.name,other}", "x"), ("${oc.select:a.missing,512}", 512), ("${.name}", "x")),
        *(("${..a.name}/${a.name}", "x/x"), ("../results/${a.both}", "../results/xy")),
        *(("no reference", "no reference"), (7, 7)),
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


@table(
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
@table("script", SCRIPTS.values())
def test_words_are_those_of_bash(script: str) -> None:
    """The settings of a script, which bash prints one a line in the place of running a command with them."""
    lines = script.replace("\\\n", " ").splitlines()
    shown = [f"printf '%s\\n' {line}" if line.lstrip().startswith("a.b") else line for line in lines]
    shown = [line.replace("; a.b", "; printf '%s\\n' a.b") for line in shown]
    done = subprocess.run(["bash", "-c", "\n".join(shown)], capture_output=True, text=True, check=True)
    assert [word.text for word in words_of(script) if word.text.startswith("a.")] == done.stdout.splitlines()


@table(
    ("script", "lines"),
    [
        ("set -x\n# a.b=0 is a remark\nmain \\\n  a.b=1 \\\n  a.c=2  # the last\n", [("a.b=1", 4), ("a.c=2", 5)]),
        # settings of an array are read where it is written
        ('DATA=(\n  a.b=8\n)\npython3 -m main "${DATA[@]}" a.c=1\n', [("a.b=8", 2), ("a.c=1", 4)]),
    ],
)
def test_words_know_their_lines(script: str, lines: list[tuple[str, int]]) -> None:
    assert [(word.text, word.line) for word in words_of(script) if word.text.startswith("a.")] == lines


@table(
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


@table("script", ["a.b='x", 'a.b="x', "a.b=${x", "a.b=$((1", "a.b=$(x", "a.b=\\", "a.b=$", "a.b=`x"])
def test_a_script_that_breaks_off_is_read_to_its_end(script: str) -> None:
    assert words_of(script)


ALL = [each for system in systems().values() for each in system.settings]
OURS = {key for setting in describe() for key in (setting.key, setting.key.removesuffix(".name"))}
SECTIONS = OURS | {key.rpartition(".")[0] for key in OURS}

TYPED = {
    "data.val_files": "environment.test_files",
    "data.train_batch_size": "rollout.prompts_per_step",
    "data.rollout_batch_size": "rollout.prompts_per_step",
    "rollout.n": "rollout.samples_per_prompt",
    "rollout.group_size": "rollout.samples_per_prompt",
    "algorithm.group_size": "rollout.samples_per_prompt",
    "rollout.response_length": "rollout.max_new_tokens",
    "rollout.name": "rollout.engine",
    "algorithm.adv_estimator": "algorithm.advantage",
    "algorithm.kl_beta": "algorithm.kl.coef",
    "algorithm.kl_penalty_type": "algorithm.kl.estimator",
    "algorithm.loss_agg_func": "algorithm.aggregation",
    "actor.loss_agg_mode": "algorithm.aggregation",
    "algorithm.clip_ratio_c": "algorithm.loss.dual_clip",
    "algorithm.ratio_clip_eps": "algorithm.loss.clip_epsilon",
    "algorithm.lam": "algorithm.advantage.gae_lambda",
    "critic.cliprange_value": "algorithm.advantage.critic.value_clip",
    "trainer.test_freq": "evaluate.every_steps",
    "custom_reward_function.path": "reward",
    "resume_checkpoint": "resume",
    "train.lr": "train.learning_rate",
    "kl_beta": "algorithm.kl.coef",
    "epsilon_high": "algorithm.loss.clip_high",
    "num_generations": "rollout.samples_per_prompt",
    "n_gpus_per_node": "cluster.gpus_per_node",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.max_loras": "rollout.engine.engine_args",
}
"""What users of verl, RLinf, mixtrain and TRL typed, and what it is here; most of it once led to another setting."""


@table(("typed", "right"), TYPED.items())
def test_what_people_typed_leads_to_the_right_setting(typed: str, right: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([Path("recipes/shapes.yaml")], [f"{typed}=1"])
    assert right in str(caught.value)


MOVED_OR_UNKNOWN = [
    each
    for each in ALL
    if each.ours and each.theirs not in OURS | Config.model_fields.keys() and not each.theirs.endswith(BELOW)
]
"""Every setting with a counterpart whose key is none of ours."""


@table("setting", MOVED_OR_UNKNOWN)
def test_every_setting_with_a_counterpart_leads_to_it(setting: Counterpart) -> None:
    message = unknown_key(setting.theirs)
    assert any(key in message for key in setting.ours), message


@table("setting", ALL)
def test_a_counterpart_is_a_setting(setting: Counterpart) -> None:
    assert bool(setting.ours) != bool(setting.none), "a counterpart, or the reason why there is none"
    assert [key for key in setting.ours if key not in SECTIONS and key not in Config.model_fields] == []
    assert not setting.harmless or setting.none


def test_metrics_of_others_are_ours() -> None:
    elsewhere = {"step", "metrics.jsonl", "fovea eval --json FILE --html FILE"}
    names = {name for system in systems().values() for pair in system.metrics for name in pair.ours.split(", ")}
    assert sorted(name for name in names - elsewhere if definition_of(name) is None) == []
    # one name for two figures is told apart
    (pair,) = [pair for pair in systems()["rlinf"].metrics if pair.theirs == "actor/rollout_train_kl"]
    assert pair.ours == "mismatch/abs"
    assert "mismatch/kl" in pair.note


def test_every_argument_of_trl_has_a_row() -> None:
    """The fields of the GRPOConfig that is installed."""
    spec: Any = importlib.util.find_spec("trl")
    source = Path(spec.submodule_search_locations[0], "trainer", "grpo_config.py").read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    fields = [each.target for each in classes["GRPOConfig"].body if isinstance(each, ast.AnnAssign)]
    names = {field.id for field in fields if isinstance(field, ast.Name)}
    assert len(names) > 60
    assert sorted(names - {setting.theirs for setting in systems()["trl"].settings}) == []


def test_a_section_of_another_system_is_for_the_importer() -> None:
    for key in ("trainer", "actor_rollout_ref", "runner"):
        assert "fovea import-config FILE" in unknown_key(key)
    # RLinf has a section `reward`, which is the name of one setting here
    with pytest.raises(ConfigError, match=r"RLinf's is environment\.reward_max_val here"):
        load_config([], ["model.tiny={}", "reward.reward_max_val=5"])
