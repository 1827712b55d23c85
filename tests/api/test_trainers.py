"""Runs from Python: the same as the command's, with functions and objects, one after the other in one process."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from typer.testing import CliRunner

import fovea
from fovea.api.settings import Settings
from fovea.cli.main import app
from fovea.config.loading import dump_config
from fovea.config.run import Config
from fovea_gym.types import Task
from gym_tests.bandit import BanditEnvironment
from gym_tests.tables import table
from tests.api.small import SETTINGS, SHAPES, of_shapes
from tests.runs import untimed
from tests.saved import saved_bytes

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def of_scenes(**more: Any) -> fovea.TrainedRun:
    return fovea.GRPO(settings=of_shapes(**more)).train()


def weights(run: fovea.TrainedRun) -> dict[str, bytes]:
    return saved_bytes(run.folder / "checkpoints" / "step-2" / "trainable")


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(getattr(fovea, name) is not None for name in fovea.__all__)
    with pytest.raises(AttributeError, match="module 'fovea' has no attribute 'GRPOTrainer'; it has GRPO, PPO, "):
        fovea.GRPOTrainer  # noqa: B018
    # the arguments are the settings of a recipe
    assert Settings.__annotations__.keys() == Config.model_fields.keys() - {"model", "environment", "reward"}


def test_a_run_from_python_equals_the_commands_bit_for_bit() -> None:
    recipe = Path("recipe.yaml")
    recipe.write_text(yaml.safe_dump(fovea.GRPO(settings={**SETTINGS, **SHAPES}).config.model_dump(mode="json")))
    done = CliRunner().invoke(app, ["train", str(recipe), "run_dir=command", "seed=3", "algorithm.name=dapo"])
    assert done.exit_code == 0, done.output
    command = fovea.load_run("command")
    python = fovea.GRPO(recipe=recipe, run_dir="python", seed=3, algorithm={"name": "dapo"}).train()
    assert len(python.metrics) == 2
    assert untimed(python.folder) == untimed(command.folder)
    assert weights(python) == weights(command)
    saved = [yaml.safe_load(run.config_file.read_text()) for run in (python, command)]
    assert saved[0] | {"run_dir": ""} == saved[1] | {"run_dir": ""}


def test_a_run_is_evaluated_compared_and_exported() -> None:
    trainer = fovea.GRPO(settings=of_shapes(run_dir="first"))
    with pytest.raises(fovea.FoveaError, match=r"\btrain\b"):
        trainer.evaluate()
    run = trainer.train(export_to="model")
    assert run.model == Path("model")
    assert (run.model / "model.safetensors").is_file()
    other = of_scenes(run_dir="second", seed=1)
    mine, theirs, gold = trainer.evaluate(other, "gold", quiet=True)
    assert mine.accuracy.n == theirs.accuracy.n == 2
    assert gold.accuracy.mean == 1
    assert [each.target for each in fovea.evaluate(run, "model", quiet=True)] == ["first step 2", "model"]
    assert fovea.export(other, "other", settings={"model.device": "cpu"}).max_logprob_difference < 1e-3
    assert trainer.export("again").folder == Path("again")


def test_a_target_of_the_export_is_checked_before_training() -> None:
    Path("model").mkdir()
    Path("model/mine.txt").touch()
    with pytest.raises(fovea.FoveaError, match=r"\bmodel: "):
        fovea.GRPO(settings=of_shapes()).train(export_to="model")
    assert not Path("run").exists()


@pytest.mark.slow
def test_nothing_of_a_run_stays_behind_in_the_process() -> None:
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    threads, states = torch.get_num_threads(), (torch.get_rng_state(), np.random.get_state()[1])
    torch.set_num_threads(2)
    try:
        first, second = (of_scenes(run_dir=name, threads=1) for name in ("first", "second"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert untimed(first.folder) == untimed(second.folder)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert {each: signal.getsignal(each) for each in handlers} == handlers


@pytest.mark.slow
def test_a_time_limit_gives_the_run_so_far() -> None:
    run = of_scenes(max_steps=50, max_hours=1e-6)
    assert (len(run.metrics), run.summary) == (1, None)


class Half:
    """A reward with a separate state."""

    def __init__(self, worth: float) -> None:
        self.worth = worth

    def __call__(self, task: Task, text: str, images: Sequence[Image.Image]) -> float:
        return self.worth

    def method(self, task: Task, text: str, images: Sequence[Image.Image]) -> float:
        return self.worth


class Late:
    async def __call__(self, task: Task, text: str, images: Sequence[Image.Image]) -> float:
        return 0.5


async def later(task: Task, text: str, images: Sequence[Image.Image]) -> float:
    return 0.5


def weighed(task: Task, text: str, images: Sequence[Image.Image], worth: float) -> float:
    return worth


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (Half(0.5), "Half"),
        (Half(0.5).method, "Half.method"),
        (later, "later"),
        (Late(), "Late"),
        (partial(weighed, worth=0.5), "weighed"),
        (lambda task, text, images: 0.5, "<lambda>"),
    ],
)
def test_whatever_can_be_called_is_a_reward(reward: Callable[..., Any], name: str) -> None:
    run = fovea.GRPO(settings=of_shapes(max_epochs=1), reward=reward).train()
    assert [row["reward"] for row in run.metrics] == [0.5, 0.5]
    assert f"reward: python:{__name__}.{name}" in run.config_file.read_text()


def shortness(completions: list[str], **columns: Any) -> list[float | None]:
    return [-len(text) / 8 for text in completions]


def test_a_list_of_rewards_is_weighed_logged_and_evaluated() -> None:
    trainer = fovea.GRPO(settings=of_shapes(reward_weights=[2, 0.5]), reward=[Half(0.25), shortness])
    run = trainer.train()
    for row in run.metrics:
        assert row["reward/Half"] == 0.25
        assert row["reward/shortness"] < 0
        assert row["reward"] == pytest.approx(2 * 0.25 + 0.5 * row["reward/shortness"], abs=1e-6)
    saved = yaml.safe_load(run.config_file.read_text())
    assert saved["reward"] == [f"python:{__name__}.Half", f"python:{__name__}.shortness"]
    (figures,) = trainer.evaluate(quiet=True)
    assert figures.parts["Half"].mean == 0.25
    with pytest.raises(fovea.FoveaError, match=r"\['python:.*Half', "):
        fovea.GRPO(settings=of_shapes(resume="auto"), reward=Half(0.25)).train()


def pays(worth: float) -> Callable[..., float]:
    return lambda task, text, images: worth


def test_a_reward_that_was_changed_is_told_on_resume() -> None:
    fovea.GRPO(settings=of_shapes(), reward=pays(0.5)).train()
    again = of_shapes(max_steps=3, resume="auto")
    with pytest.raises(fovea.FoveaError, match=r"code of the reward python:.*pays\.<locals>\.<lambda> was \w+ and is"):
        fovea.GRPO(settings=again, reward=pays(0.7)).train()
    assert len(fovea.GRPO(settings=again, reward=pays(0.5)).train().metrics) == 3
    with pytest.raises(fovea.FoveaError, match=r"^reward=python:"):
        fovea.evaluate("run", trust=True)


def test_the_command_says_how_a_run_with_a_lambda_goes_on() -> None:
    """And what it says works."""
    fovea.GRPO(settings=of_shapes(), reward=pays(0.5)).train()
    Path("rewards.py").write_text("def half(task, text, images):\n    return 0.5\n")
    command = ["train", "run/config.yaml", "resume=auto", "max_steps=3"]
    from_python = r"again from Python[,:].* fovea\.GRPO\(recipe='{}config\.yaml', reward=\.\.\., resume='auto'\)"
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert re.search(from_python.format("RUN/"), done.output)
    assert "reward=path/to/file.py:name (a lambda or a local name has to become a def or class" in done.output
    done = CliRunner().invoke(app, [*command, "reward=rewards.py:half"])
    assert re.search(from_python.format("run/"), done.output)
    resumed = fovea.GRPO(recipe="run/config.yaml", reward=pays(0.5), resume="auto", max_steps=3)
    assert len(resumed.train().metrics) == 3
    assert CliRunner().invoke(app, ["eval", "run", "reward=rewards.py:half"]).exit_code == 0


def test_an_environment_may_be_an_object() -> None:
    trainer = fovea.GRPO(settings=SETTINGS, environment=BanditEnvironment(), run_dir="run")
    run = trainer.train()
    assert len(run.metrics) == 2
    assert "file: python:gym_tests.bandit.BanditEnvironment" in run.config_file.read_text()
    assert trainer.evaluate("gold", quiet=True)[1].accuracy.mean == 1


def test_settings_are_one_tree_however_they_are_written() -> None:
    settings = {"model.tiny": {}, "environment.name": "shapes", "rollout.top_p": 0.9, "algorithm.loss": "sapo"}
    dotted = fovea.GRPO(settings=settings).config
    algorithm = {"loss": {"name": "sapo"}}
    nested = fovea.GRPO(model={"tiny": {}}, environment="shapes", rollout={"top_p": 0.9}, algorithm=algorithm).config
    assert (dotted, dotted.rollout.top_p) == (nested, 0.9)
    # sections take dotted names, and weights any names
    rollout = {"engine.name": "vllm", "engine": {"engine_args": {"a.b": {"c.d": 1}}}}
    data = {"kind_weights": {"count.all": 2}}
    config = fovea.GRPO(model={"tiny": {}}, environment="shapes", rollout=rollout, data=data).config
    assert config.rollout.engine.engine_args == {"a.b": {"c.d": 1}}  # type: ignore[union-attr]
    assert config.data.kind_weights == {"count.all": 2}
    with pytest.raises(fovea.FoveaError, match=r"\brollout\.top_p\b"):
        fovea.GRPO(model={"tiny": {}}, rollout={"top_p": 0.5}, settings={"rollout": {"top_p": 0.9}})
    with pytest.raises(fovea.FoveaError, match=r"\bkind_weights\.a\b"):
        fovea.GRPO(model={"tiny": {}}, data={"kind_weights": {"a": 1}}, settings={"data.kind_weights.a": 2})
    # NumPy's numbers are numbers
    settings = {"max_steps": np.int64(5), "rollout": {"top_p": np.float32(0.5)}, "profile": np.bool_(True)}
    betas = {"train": {"betas": [np.float64(0.5), np.float32(0.25)]}}
    config = fovea.GRPO(model={"tiny": {}}, environment="shapes", **settings, **betas).config
    assert (config.max_steps, config.rollout.top_p, config.profile) == (5, 0.5, True)
    assert config.train.betas == (0.5, 0.25)


def test_an_algorithm_is_chosen_by_its_name_alone() -> None:
    assert fovea.GRPO(model={"tiny": {}}, environment="shapes", algorithm="gspo").config.algorithm.loss.name == "gspo"
    assert fovea.PPO(model={"tiny": {}}, environment="shapes", algorithm="ppo").config.algorithm.name == "ppo"
    assert fovea.PPO(model={"tiny": {}}, environment="shapes").config.algorithm.name == "ppo"
    with pytest.raises(fovea.FoveaError, match=r"algorithm\.name=ppo\b.*\bfovea\.PPO\b"):
        fovea.GRPO(model={"tiny": {}}, algorithm="ppo")
    with pytest.raises(fovea.FoveaError, match=r"algorithm\.name=grpo\b.*\bfovea\.GRPO\b"):
        fovea.PPO(model={"tiny": {}}, algorithm={"name": "grpo"})


def test_of_several_recipes_later_ones_win_and_a_path_takes_the_place_of_a_tiny_model() -> None:
    Path("small.yaml").write_text("max_steps: 7\nwarmup: null\n")
    config = fovea.GRPO(recipe=["shapes", Path("small.yaml")], seed=3).config
    assert (config.environment.name, config.max_steps, config.warmup, config.seed) == ("shapes", 7, None, 3)
    done = CliRunner().invoke(app, ["config", "shapes", "small.yaml", "seed=3"])
    assert yaml.safe_load(done.output) == yaml.safe_load(dump_config(config))
    Path("tiny.yaml").write_text("model: {tiny: {}}\n")
    model = fovea.GRPO(recipe="tiny.yaml", model=Path("folder")).config.model
    assert (model.path, model.tiny) == ("folder", None)


ROWS = [{"image": b""}]


@table(
    ("arguments", "message"),
    [
        ({"rollout": {"top_q": 1}}, r"arguments: rollout\.top_q: no such setting; did you mean rollout\.top_k|top_p"),
        ({"settings": {"rollout.top_p": 2.0}}, r"arguments: rollout\.top_p: 2\.0 does not fit; allowed: "),
        ({"seed": 1, "settings": {"seed": 2}}, r"arguments: seed is given twice; give it once"),
        ({"seed": {1}}, r"arguments: seed: \{1\} does not fit; a value is text, a finite number"),
        ({"seed": np.float64("inf")}, r"arguments: seed: inf does not fit; a value is text, a finite number"),
        ({"algorithm": {"name": "ppo"}}, r"algorithm\.name=ppo .* has a value function; use fovea\.PPO"),
        ({"max_restarts": 3}, r"max_restarts=3 restarts the command `fovea train`"),
        ({"reward": 3}, r"reward=3 is of type int, not a function"),
        ({"reward": [later, later]}, r"logged as reward/NAME, but later names 2 of them; write each as a def with a"),
        ({"reward": [later, lambda task, text, images: 1]}, r"but <lambda> names 1 of them; write each as a def"),
        ({"reward": []}, r"reward=\[\] names no function; name one or more, or leave reward out"),
        ({"reward": [later, 3]}, r"reward=3 is of type int, not a function; give one of the task"),
        ({"reward": Half}, r"is the class Half, not a function; give an instance, Half\(\.\.\.\), or"),
        ({"reward": later, "reward_weights": [1]}, r"reward_weights=\[1\.0\] .*=.*later is one function; give as"),
        ({"reward": [later, Half(1)], "reward_weights": [1]}, r"reward_weights=\[1\.0\] .* reward has 2 functions"),
        ({"reward": lambda completions, trainer_state: 1}, r"`trainer_state`, which only TRL's .*=None, or write def"),
        ({"reward": lambda text: 1.0}, r"takes \(text\), but is called as .*task, text, images"),
        ({"environment": Half}, r"environment=Half\b"),
        ({"rows": ROWS}, r"\brows\b.*\breward=function\b"),
        ({"rows": ROWS, "recipe": "shapes"}, r"\brows\b.*\bname=shapes\b"),
        ({"rows": ROWS, "environment": {"name": "own", "file": "a.py:C"}}, r"\brows\b.*\benvironment\.name=own\b"),
        ({"rows": ROWS, "reward_funcs": later}, r"\breward_funcs: .*\breward\b"),
        ({"reward": "accuracy"}, r"\breward=accuracy\b"),
        ({"reward": ["mine.py:f", later]}, r"\breward=mine\.py:f: "),
        ({"environment": "mine.py:C"}, r"\benvironment=mine\.py:C: "),
        ({"environment": 3}, r"\benvironment=3\b.*\bint\b"),
        ({"environment": Half(1)}, r"environment=Half has no method tasks; add tasks\(split\)"),
        ({"settings": "seed=1"}, r"\bsettings='seed=1'.*\bstr\b"),
        ({"test_rows": ROWS}, r"\brows\b"),
        ({"model": torch.nn.Linear(1, 1)}, r"^model\b.*\bLinear\b"),
        ({"recipe": {"seed": 1}}, r"^recipe\b.*\bdict\b"),
        ({"recipe": ["shapes", 3]}, r"^recipe\b.*\bint\b"),
        ({"recipe": []}, r"is given nothing to train on; give rows"),
    ],
)
def test_what_wrong_arguments_are_told(arguments: Mapping[str, Any], message: str) -> None:
    with pytest.raises(fovea.FoveaError, match=message):
        fovea.GRPO(**{"model": {"tiny": {}}, **arguments})
    with pytest.raises(fovea.FoveaError, match=r"\bfovea\.GRPO\(mo"):
        fovea.GRPO("folder", later)  # type: ignore[arg-type]


def test_rows_may_be_the_names_of_files() -> None:
    for name, number in (("train", 12), ("test", 2)):
        Path(f"{name}.jsonl").write_text('{"question": "q", "answer": "a"}\n' * number)
    given = {"rows": "train.jsonl", "test_rows": Path("test.jsonl"), "environment": {"image_keys": [], "dev_share": 0}}
    trainer = fovea.GRPO(settings=SETTINGS, reward=lambda task, text, images: 1.0, run_dir="run", **given)
    environment = trainer.config.environment
    assert environment.name == "rows"
    assert (environment.train_files, environment.test_files) == (("train.jsonl",), ("test.jsonl",))
    assert trainer.train().summary is not None
    names = ["train.jsonl", Path("test.jsonl")]
    several = fovea.GRPO(settings=SETTINGS, reward=lambda task, text, images: 1.0, rows=names)
    assert several.config.environment.train_files == ("train.jsonl", "test.jsonl")
    with pytest.raises(fovea.FoveaError, match=r"no such file absent\.parquet"):
        fovea.GRPO(settings=SETTINGS, rows="absent.parquet", reward=lambda task, text, images: 1.0).train()


def test_a_mapping_that_holds_itself_is_told() -> None:
    circle: dict[str, object] = {}
    circle["train"] = [{"a": circle}]
    for key, given in (("train", {"settings": circle}), ("data", {"data": circle})):
        told = f"settings: {key}: is nested more than 50 levels deep, or holds itself; flatten it"
        with pytest.raises(fovea.FoveaError, match=told):
            fovea.GRPO(model={"tiny": {}}, **given)


@pytest.mark.parametrize("trainer", [fovea.GRPO, fovea.PPO])
def test_a_run_of_nothing_is_told_what_to_give(trainer: type[fovea.GRPO | fovea.PPO]) -> None:
    """The command has a data set by default; a line of Python that forgets its rows must not train on that."""
    nothing = rf"fovea\.{trainer.__name__} is given nothing to train on; give rows=frame and reward=function, an env"
    for more in ({}, {"max_steps": 3}, {"reward": later}):
        with pytest.raises(fovea.FoveaError, match=nothing):
            trainer(model={"tiny": {}}, **more)
    with pytest.raises(fovea.FoveaError, match=r"\benviroment: .*\benvironment\b"):
        trainer(model={"tiny": {}}, enviroment="shapes")  # type: ignore[call-arg]
    assert trainer(model={"tiny": {}}, environment="shapes").config.environment.name == "shapes"
    assert trainer(model={"tiny": {}}, settings={"environment.train_size": 8}).config.environment.name == "shapes"
    assert trainer(recipe="shapes").config.environment.name == "shapes"


@table(
    ("reward", "message"),
    [
        (lambda completions, **kwargs: [1.0, 2.0], r"raised ValueError: .*\[1\.0, 2\.0\]"),
        (lambda completions, **kwargs: 1.0, r"raised ValueError: .*\b1\.0\b"),
        (lambda task, text, images: task.anwser, r"raised AttributeError: .*anwser"),
        (lambda task, text, images: [1.0, 2.0], r"returned \[1\.0, 2\.0\], which is not a number"),
    ],
)
def test_what_a_wrong_reward_is_told_before_the_model_is_loaded(reward: Callable[..., Any], message: str) -> None:
    with pytest.raises(fovea.FoveaError, match=message):
        fovea.GRPO(settings=of_shapes(), reward=reward).train()
    assert not Path("run").exists()
