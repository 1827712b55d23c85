"""The package that docs/extending.md builds: its code as it stands there, installed beside Fovea, in real runs."""

from __future__ import annotations

import configparser
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fovea.cli import main
from fovea.commands.trust import wants_trust
from fovea.config.algorithm import Algorithm
from fovea.config.describe import describe
from fovea.config.loading import dump_config, load_config
from fovea.config.model import Model
from fovea.config.run import Config
from fovea.errors import ModelError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.models.families.named import NamedFamily
from fovea.models.plain import PlainVLM
from fovea.models.processor import load_processor
from fovea.models.vlm import VLM
from fovea.run.checkpoint import write_manifest
from fovea.wiring.run import build
from fovea_gym.errors import ConfigError, DataError
from fovea_tools.families.tiny import save_tiny_kind
from tests.hub_models import TOLERANCE, Loaded, assert_inputs_equal, needs_image_processors
from tests.policies import batch_of, make_policy, update_gradients
from tests.reference import largest_relative_difference
from tests.runs import ROOT, run_program
from tests.saved import make_checkpoint
from tests.tiny_models import CORPUS, tiny

PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
BLOCKS = {
    name: code
    for language, name, code in re.findall(r"^```(\w+)\n(?:# (\S+)\n)?(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    if name or language == "toml"
}
PROJECT = tomllib.loads(BLOCKS[""])
SMALL = [
    *("environment.step=20", "warmup={max_steps: 30, stop_accuracy: 0.7}"),
    *("max_steps=2", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=4", "rollout.max_new_tokens=3"),
    *("algorithm.entropy_coef=0.01", "algorithm.max_groups_without_signal=2"),
    *("log.tensorboard=false", "log.progress=false"),
]


def install(folder: Path, project: dict[str, Any], files: dict[str, str]) -> None:
    """Lay out a package and its metadata as pip does."""
    for name, code in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(code, encoding="utf-8")
    name, version = project["name"], project["version"]
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    points = configparser.ConfigParser(delimiters="=")
    points.read_dict(project["entry-points"])
    with (metadata / "entry_points.txt").open("w", encoding="utf-8") as file:
        points.write(file)


def forget(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages; the working directory is an empty one."""
    folder, work = tmp_path / "site", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for package in ("fovea_plus", "other"):
        forget(package)


@pytest.fixture
def plus(site: Path) -> Path:
    install(site, PROJECT["project"], {name: code for name, code in BLOCKS.items() if name.endswith(".py")})
    Path("plus.yaml").write_text(BLOCKS["plus.yaml"], encoding="utf-8")
    return site


def other(site: Path, group: str, name: str, code: str, package: str = "other-parts") -> None:
    """Install a package with one part, `Part` of this code."""
    project = {"name": package, "version": "1.0", "entry-points": {group: {name: "other:Part"}}}
    install(site, project, {"other.py": code})


def settings(*overrides: str) -> Config:
    return load_config([Path("plus.yaml")], [*SMALL, *overrides])


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(*overrides)
    return str(caught.value)


def check_parity(engine: str) -> None:
    parity = json.loads(Path("run/parity.json").read_text())
    assert (parity["engine"], parity["passed"]) == (engine, True)


def test_the_page_registers_all_of_its_files() -> None:
    places = [place for parts in PROJECT["project"]["entry-points"].values() for place in parts.values()]
    modules = {place.partition(":")[0].replace(".", "/") for place in places}
    assert {f"{module}.py" for module in modules} == {name for name in BLOCKS if name.endswith(".py")}


def test_a_run_of_a_loss_an_engine_an_environment_and_a_tracker(plus: Path) -> None:
    config = settings("run_dir=run", "algorithm.minibatches=2", "train.backend.logits_mib=0.005")
    train(build(config))
    rows = read_metrics(Path("run"))
    assert [(row["step"], row["grad_norm"] > 0) for row in rows] == [(1, True), (2, True)]
    check_parity("slow")
    first, *steps = map(json.loads, Path("lines.jsonl").read_text().splitlines())
    assert first["seed"] == config.seed
    expected = [(first["run"], row["step"], row["reward"]) for row in rows]
    assert [(line["run"], line["step"], line["reward"]) for line in steps] == expected
    assert load_config([Path("run/config.yaml")], []) == config


def test_a_resumed_run_compares_the_version_of_a_package(plus: Path) -> None:
    given = ("run_dir=run", "warmup=null", "rollout.engine=embedded", "checkpoint.every_steps=1")
    train(build(settings(*given, "max_steps=1")))
    metadata = plus / "fovea_plus-0.1.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 0.1", "Version: 0.2"))
    with pytest.raises(DataError, match=r"library fovea-plus was 0\.1 and is 0\.2"):
        build(settings(*given, "resume=auto"))


@pytest.mark.parametrize("on_policy", [True, False])
def test_a_loss_that_couples_tokens_has_the_gradients_of_whole_rows_in_chunks(plus: Path, on_policy: bool) -> None:
    algorithm, batch = Algorithm.model_validate({"loss": "gmpo"}), batch_of(on_policy=on_policy)
    whole, chunks = (
        update_gradients(make_policy(tiny("qwen3_vl"), algorithm=algorithm, backend=backend, lr_warmup_steps=0), batch)
        for backend in ({}, {"logits_mib": 0.005})
    )
    assert largest_relative_difference(whole, chunks) < 1e-5


def test_an_engine_refuses_settings_of_its_own(plus: Path) -> None:
    refused = "plus.yaml and command line: rollout.engine=slow draws from all tokens"
    assert refusal("rollout.top_p=0.9").startswith(refused)
    assert settings("rollout.temperature=5").rollout.temperature == 5, "and none of vLLM's"


def python_with(folder: Path) -> Path:
    """An interpreter whose environment has the packages of a folder besides."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{folder}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("parts", [[], ["environment={name: mixture, parts: {greys: {environment: grey}}}"]])
def test_an_engine_runs_in_an_environment_with_only_its_package(parts: list[str], plus: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    points = {"fovea.engines": PROJECT["project"]["entry-points"]["fovea.engines"]}
    code = {"fovea_plus/slow_engine.py": BLOCKS["fovea_plus/slow_engine.py"]}
    install(elsewhere, PROJECT["project"] | {"entry-points": points}, code)
    given = ["run_dir=run", f"rollout.engine.python={python_with(elsewhere)}", "max_steps=1"]
    train(build(load_config([Path("plus.yaml")], [*SMALL[2:], *given, *parts])))
    check_parity("slow")


def test_an_environment_without_the_engine_says_so(plus: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    python = python_with(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"empty/python: the settings do not fit there .*rollout\.engine.*'slow'"):
        build(settings("run_dir=run", f"rollout.engine.python={python}"))


def test_settings_of_a_package_are_as_strict_as_ours(plus: Path) -> None:
    assert refusal("environment.stpe=3").endswith("environment.stpe: no such setting; did you mean environment.step?")
    assert refusal("environment.step=41").endswith("environment.step: 41 does not fit; allowed: integer >= 1 and <= 40")
    assert "environment.step: 3.0 does not fit" in refusal("environment.step=3.0")
    with pytest.raises(ConfigError, match=r"command line: log\.tracker\.file: must be set; allowed: text"):
        load_config([], ["model.tiny={}", "log.tracker=lines"])
    assert "environment.step: a setting of environment.name=grey only" in refusal("environment=shapes")


def test_help_lists_the_settings_of_a_package(plus: Path) -> None:
    shown = CliRunner().invoke(main.app, ["config", "environment=grey"]).stdout
    step = "environment.step = 3    (integer >= 1 and <= 40)\n    Distance between two shades of grey of 256.\n"
    assert step in shown
    assert "environment.session.deadline_seconds = 60.0" in shown, "settings of every environment"
    assert "grey: A grey image, which is dark or light." in describe("environment.name")[0].doc
    lines = CliRunner().invoke(main.app, ["config", "log.tracker=lines"]).stdout
    assert lines.startswith("log.tracker.file = must be set    (text; may change on resume)\n")
    assert "\n  step: 5\n" in dump_config(load_config([Path("plus.yaml")], []))


LISTS_PARTS = """
import sys
from fovea.cli.main import app
from fovea.config.describe import describe
from fovea.config.loading import load_config
from fovea_gym.errors import ConfigError
from typer.testing import CliRunner

print(describe("algorithm.loss.name")[0].type, describe("log.tracker")[0].type)
print(CliRunner().invoke(app, ["--help"]).stdout)
load_config([], ["model.tiny={}"])
try:
    load_config([], ["model.tiny={}", "rollout.engine=slwo"])
except ConfigError as error:
    print(error)
assert not [name for name in sys.modules if name.startswith(("fovea_plus", "torch"))]
load_config([], ["model.tiny={}", "rollout.engine=slow"])
assert [name for name in sys.modules if name.startswith("fovea_plus.")] == ["fovea_plus.slow_engine"]
"""


def test_nothing_is_imported_before_a_setting_names_it(plus: Path) -> None:
    ran = run_program([sys.executable, "-c", LISTS_PARTS], {"PYTHONPATH": f"{ROOT}:{plus}"}, cwd=Path.cwd())
    assert ran.returncode == 0, ran.stderr
    assert "clip | gspo | cispo | sapo | gmpo lines\n" in ran.stdout
    assert re.search(r"steps +A command of the package fovea-plus\.", ran.stdout)
    allowed = "embedded | vllm | vllm_servers | sglang | slow"
    assert f'rollout.engine.name: "slwo" does not fit; allowed: {allowed}' in ran.stdout


MIXTURE = {"name": "mixture", "parts": {"a": {"environment": {"name": "part"}}}}


@pytest.mark.parametrize(
    ("group", "key", "section", "instead"),
    [
        ("environments", "environment", {"environment": "part"}, "shapes"),
        ("environments", "environment.parts.a.environment", {"environment": MIXTURE}, "shapes"),
        ("losses", "algorithm.loss", {"algorithm": {"loss": "part"}}, "clip"),
        ("engines", "rollout.engine", {"rollout": {"engine": {"name": "part"}}}, "embedded"),
        ("trackers", "log.tracker", {"log": {"tracker": {"name": "part"}}}, "null"),
    ],
)
def test_a_folder_that_names_a_part_of_a_package_does_not_import_it(
    group: str, key: str, section: dict[str, Any], instead: str, site: Path
) -> None:
    other(site, f"fovea.{group}", "part", "from pathlib import Path\nPath('imported').touch()\nPart = 1\n")
    checkpoint = make_checkpoint(Path("run"), 1)
    (checkpoint / "state.json").write_text('{"format": 2, "step": 1}')
    write_manifest(checkpoint)
    Path("run/config.yaml").write_text(json.dumps({"model": {"tiny": {}}, **section}))
    resume = ["workflow", "vlm-rl-training", "--input"]
    # of the settings that differ, the tracker's may change on resume
    differs = " began with 0.0; set it back" if key == "log.tracker" else f"{key}.name=part, a part of another package"
    trusts = f"runs the code of another package by {key}.name=part"
    for words, refusal_text in (
        (["eval", "run"], trusts),
        (["eval", "run", f"{key}={instead}"], trusts),  # the settings of the folder are read before the user's
        (["eval", "run", "--recipe", "shapes"], trusts),
        (["export", "run", "--out", "out"], trusts),
        ([*resume, json.dumps({"resume_checkpoint": "run"})], trusts),
        (["train", "shapes", "run_dir=run", "resume=auto"], differs),
        (["train", "shapes", "run_dir=run", f"resume={checkpoint}"], differs),
    ):
        refused = CliRunner().invoke(main.app, words, env={"COLUMNS": "400"})
        assert refused.exit_code == 2, refused.output
        assert refusal_text in refused.stderr
        assert not Path("imported").exists(), words
    for words in (
        ["eval", "run", "--trust"],
        ["eval", "run", f"{key}=part"],
        [*resume, json.dumps({"resume_checkpoint": "run", "settings": {key: "part"}})],
    ):
        allowed = CliRunner().invoke(main.app, words, env={"COLUMNS": "400"})
        assert "part is registered as 1, which does not fit" in allowed.stderr
        assert Path("imported").exists(), words
        Path("imported").unlink()
        forget("other")


def test_a_run_with_a_part_of_a_package_is_evaluated_by_trust(plus: Path) -> None:
    own = ["environment=shapes", "rollout.engine=embedded", "algorithm.loss=clip", "log.tracker=null"]
    assert not wants_trust(load_config([Path("plus.yaml")], own))
    for number in range(len(own)):
        assert wants_trust(load_config([Path("plus.yaml")], [*own[:number], *own[number + 1 :]]))


@pytest.mark.parametrize("name", ["frozen_lake", "pages", "shapes_zoom", "sokoban"])
def test_an_example_is_an_environment_of_a_package_that_comes_with_fovea(name: str) -> None:
    config = load_config([], ["model.tiny={}", f"environment={name}"])
    assert type(config.environment).__module__.startswith("fovea_gym.examples.")
    assert load_config([], ["model.tiny={}", f"environment={json.dumps(config.environment.model_dump())}"]) == config
    parts = f"environment={{name: mixture, parts: {{a: {{environment: {{name: {name}, train_size: 7}}}}}}}}"
    assert load_config([], ["model.tiny={}", parts]).environments["environment.parts.a.environment"].name == name
    assert not wants_trust(config)


@pytest.mark.parametrize(
    ("group", "name", "setting"),
    [
        ("fovea.losses", "clip", "algorithm.loss=clip"),
        ("fovea.engines", "embedded", "rollout.engine.max_batch_tokens=9"),
        ("fovea.environments", "geo3k", "environment=geo3k"),
    ],
)
def test_a_name_of_ours_is_refused(group: str, name: str, setting: str, site: Path) -> None:
    other(site, group, name, "raise AssertionError('imported')\n")
    load_config([], ["model.tiny={}"])
    with pytest.raises(ConfigError, match=f"{group}: other-parts registers {name}, which is one of Fovea's names"):
        load_config([], ["model.tiny={}", setting])


def test_a_package_that_was_imported_takes_no_name_of_ours(site: Path) -> None:
    settings_of_ours = "name: Literal['clip'] = 'clip'\n    extra: int = 1\n    def policy_loss(self): ..."
    other(site, "fovea.losses", "clip", part_of("algorithm.SapoLoss", settings_of_ours))
    importlib.import_module("other")
    assert describe("algorithm.loss.name")[0].type == "clip | gspo | cispo | sapo"
    assert not [setting for setting in describe("algorithm.loss") if setting.key == "algorithm.loss.extra"]


SIGNS = """
from typing import Literal
from fovea_gym.environments.base import Environment
from fovea_gym.settings.splits import EnvironmentSettings
from fovea_gym.types import Message, Score, Task

class Part(EnvironmentSettings):
    name: Literal["signs"] = "signs"
    largest: int = 9

    def make(self, access, seed):
        assert access.imitated and seed == 7
        return Signs(self)

class Signs(Environment):
    def __init__(self, settings):
        self.settings, self.graders = settings, (self,)

    def tasks(self, split):
        numbers = range(-self.settings.largest, self.settings.largest + 1)
        return [Task(id=f"{split}/{n}", question=f"{n} < 0?", answer="no" if n >= 0 else "yes") for n in numbers]

    def prompt(self, task):
        return [Message(role="user", parts=(task.question,))]

    def target(self, task):
        return task.answer

    async def score(self, task, turns):
        right = float(turns[-1].text == task.answer)
        return Score(reward=right, accuracy=right)
"""


def test_an_environment_with_graders_is_one_file(site: Path) -> None:
    other(site, "fovea.environments", "signs", SIGNS)
    given = ["model.tiny={}", "run_dir=run", "seed=7", "environment=signs", "rollout.engine=embedded", *SMALL[1:]]
    train(build(load_config([], given)))
    assert [row["step"] for row in read_metrics(Path("run"))] == [1, 2]


ATLAS = """
from typing import Literal
from fovea_gym.settings.splits import EnvironmentSettings

class Part(EnvironmentSettings):
    name: Literal["atlas"] = "atlas"
    dev_seed: int = 7
    lat_key: str = "y"
    levels: dict[str, int] = {}

    def make(self) -> None: ...
"""


def test_a_part_may_name_a_setting_as_an_earlier_version_did(site: Path) -> None:
    other(site, "fovea.environments", "atlas", ATLAS)
    words = ["environment.dev_seed=0", "environment=atlas", "environment.lat_key=lat", "environment.levels={easy: 1}"]
    environment = load_config([ROOT / "recipes/shapes.yaml"], words).environment
    own = {"name": "atlas", "dev_seed": 0, "lat_key": "lat", "levels": {"easy": 1}}
    assert {key: value for key, value in environment.model_dump().items() if key in own} == own


def test_a_name_of_two_packages_is_refused(plus: Path) -> None:
    other(plus, "fovea.losses", "gmpo", "Part = 1\n")
    assert re.search(r"fovea\.losses: (\S+ and \S+) both register gmpo; uninstall one", refusal())


def part_of(base: str, name: str = "name: Literal['part'] = 'part'") -> str:
    """Code of settings that derive from a class of Fovea's, with no method of their own."""
    module, _, cls = base.partition(".")
    package = "fovea_gym.settings" if module == "splits" else "fovea.config"
    imports = f"from typing import Literal\nfrom {package}.{module} import {cls}\n"
    return f"{imports}class Part({cls}):\n    {name}\n"


WITH_LINE = r"with the line `name: Literal\['part'\] = 'part'`"
NO_METHOD = "which does not fit; .* method "


@pytest.mark.parametrize(
    ("group", "setting", "code", "message"),
    [
        ("losses", "algorithm.loss", "import no_such\n", "it raised ModuleNotFoundError: No module named 'no_such"),
        ("losses", "algorithm.loss", "Part = 1\n", "as 1, which does not fit; register a class that derives from fo"),
        ("losses", "algorithm.loss", part_of("algorithm.LossSettings", "name: str = ''"), WITH_LINE),
        ("losses", "algorithm.loss", part_of("algorithm.LossSettings"), rf"{NO_METHOD}policy_loss \("),
        ("engines", "rollout.engine", part_of("backends.StreamedEngine"), rf"{NO_METHOD}make \("),
        ("environments", "environment", part_of("splits.EnvironmentSettings"), rf"{NO_METHOD}make \("),
        ("trackers", "log.tracker", part_of("sections.TrackerSettings"), rf"{NO_METHOD}connect \("),
    ],
    ids=["import", "a number", "name", "loss", "engine", "environment", "tracker"],
)
def test_a_part_that_does_not_fit_is_refused(group: str, setting: str, code: str, message: str, site: Path) -> None:
    other(site, f"fovea.{group}", "part", code)
    with pytest.raises(ConfigError, match=rf"fovea\.{group}: .*part.* {message}"):
        load_config([], ["model.tiny={}", f"{setting}=part"])


@needs_image_processors
def test_a_family(plus: Path) -> None:
    loaded = Loaded.of(save_tiny_kind("llava", Path("model"), CORPUS))
    assert isinstance(loaded.processor.family, NamedFamily)
    assert loaded.processor.family.box_frame(loaded.prompts[1].images[0]) == (1, 1)
    assert_inputs_equal(loaded)
    for path in (VLM, PlainVLM):
        assert loaded.check(path(loaded.network, loaded.processor.banned_ids)) < TOLERANCE
    config = settings("run_dir=run", "model.tiny=null", "model.path=model", "warmup=null", "rollout.engine=embedded")
    train(build(config))
    check_parity("embedded")
    assert len(read_metrics(Path("run"))) == 2


def test_a_family_that_nobody_has_is_named_with_those_of_packages(plus: Path) -> None:
    save_tiny_kind("idefics3", Path("model"), CORPUS)
    written = json.loads(Path("model/config.json").read_text()) | {"model_type": "idefics2"}
    Path("model/config.json").write_text(json.dumps(written))
    with pytest.raises(ModelError, match=r"model_type is idefics2, but Fovea only has .*gemma4, llava; set model"):
        load_processor(Model(path="model"))


def test_a_command(plus: Path) -> None:
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    assert CliRunner().invoke(main.app, ["steps", "run"]).stdout == "2\n"
    assert "Print the number of steps of a run." in CliRunner().invoke(main.app, ["steps", "--help"]).stdout


def test_a_command_of_our_name_is_refused(site: Path) -> None:
    other(site, "fovea.commands", "plan", "raise AssertionError('imported')\n")
    refused = CliRunner().invoke(main.app, ["plan", "shapes"])
    assert refused.exit_code == 2
    assert "fovea.commands: other-parts registers plan, which is one of Fovea's names" in refused.stderr
    assert CliRunner().invoke(main.app, ["config", "seed"]).exit_code == 0


def test_a_class_in_a_file_needs_no_package(site: Path) -> None:
    code = BLOCKS["fovea_plus/grey.py"].replace("step: int", "settings: dict").replace("= step", '= settings["step"]')
    Path("mine.py").write_text(code)
    own = ["environment=mine.py:DarkOrLight", "environment.settings.step=40"]
    graded = build(load_config([], ["model.tiny={}", "run_dir=run", *SMALL[2:], *own, "max_steps=1"]))
    assert len(graded.sources.train.tasks) == 7
