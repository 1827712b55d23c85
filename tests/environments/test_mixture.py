"""A mixture: every task goes to its own environment and graders, and parts come by their shares."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fovea.commands.dry_run import plan
from fovea.commands.evaluate import EvalOptions, evaluate_targets
from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.wiring.data import make_order
from fovea.wiring.environment import make_environment
from fovea.wiring.run import build
from fovea_gym.environments.access import GradedEnvironment
from fovea_gym.environments.mixture import Mixture, Part
from fovea_gym.environments.shapes.environment import Shapes
from fovea_gym.environments.shapes.questions import KINDS
from fovea_gym.errors import ConfigError, DataError, ScoreError
from fovea_gym.graders.grading import CallLimits, Grading, LimitedCalls
from fovea_gym.rows.tasks import kinds_of, place_of
from fovea_gym.settings.environments import ShapesEnvironment
from fovea_gym.types import Score, Task, Turn

ROLLOUT = {"prompts_per_step": 8, "samples_per_prompt": 2, "max_new_tokens": 4}
REST = {
    "log": {"tensorboard": False, "progress": False},
    "evaluate": {"image_controls": False, "shared_images": "ignore", "test_size": 6},
    "checkpoint": {"every_steps": 2},
    "algorithm": {"entropy_coef": 0.01, "max_groups_without_signal": 8},
}
SPLITS = ("train", "test")
OWN = """
from fovea_gym.types import Message, Task

def half(task, text, images):
    if "fails" in __file__:
        raise KeyError("no such answer")
    return 0.5

class Sums:
    def tasks(self, split):
        return [Task(id=str(n), question=f"1 + {n}", answer=str(n + 1), kind="sums") for n in range(4)]
    def prompt(self, task):
        return [Message(role="user", parts=(task.question,))]
    def target(self, task):
        return task.answer
    def score(self, task, turns):
        return float(turns[-1].text == task.answer)
"""


def config_of(parts: dict[str, Any], **settings: object) -> Config:
    model = {"tiny": {"hidden_size": 32, "num_layers": 1}}
    environment = {"name": "mixture", "parts": parts}
    return Config.model_validate({"model": model, "environment": environment, "rollout": ROLLOUT, **REST, **settings})


def parts_in(folder: Path) -> dict[str, Any]:
    """Ten questions in a file at a share of 3, and a hundred scenes at a share of 1."""
    rows = [{"question": f"How many is {n}?", "answer": str(n)} for n in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [str(folder / "rows.jsonl")]
    words = {"name": "vqa", "train_files": files, "dev_files": files, "test_files": files}
    scenes = {"name": "shapes", "train_size": 100, "dev_size": 8, "test_size": 8}
    return {"words": {"share": 3.0, "environment": words}, "scenes": {"environment": scenes}}


def reward_of(graded: GradedEnvironment, part: str, text: str) -> float:
    environment = graded.environment
    task = next(task for task in environment.tasks("train") if task.id.startswith(f"{part}/"))
    (score,) = asyncio.run(graded.grading.scores(task, [[Turn(messages=tuple(environment.prompt(task)), text=text)]]))
    return score.reward


def test_every_task_goes_to_its_own_environment(tmp_path: Path) -> None:
    mixed = make_environment(config_of(parts_in(tmp_path)))
    environment = mixed.environment
    tasks = environment.tasks("train")
    assert len(tasks) == len({task.id for task in tasks}) == 110
    assert Counter(kind.partition("/")[0] for kind in kinds_of(tasks)) == {"words": 10, "scenes": 100}
    assert set(kinds_of(tasks)) == {"words", *(f"scenes/{kind}" for kind in KINDS)}
    # every prefix holds a word for ten scenes
    words = [index for index, task in enumerate(tasks) if task.kind == "words"]
    assert words == [*range(5, 110, 11)]
    place = place_of(tasks, words[2])
    assert (place is not None and place.where, place_of(tasks, 50)) == ("rows.jsonl line 3", None)
    for index in (words[2], 50, 109):
        task = tasks[index]
        assert task.kind == kinds_of(tasks)[index]
        answer = environment.target(task)
        assert environment.demonstration(task) == (answer,)
        turns = [[Turn(messages=tuple(environment.prompt(task)), text=text)] for text in (answer, "no idea")]
        right, wrong = asyncio.run(mixed.grading.scores(task, turns))
        assert (right.reward, wrong.reward) == (1, 0)
        assert len(task.images) == (0 if index in words else 1)


class Pair:
    """A grader that scores an answer when another one has come, too."""

    def __init__(self) -> None:
        self._both = asyncio.Barrier(2)

    async def score(self, _task: Task, _turns: Sequence[Turn]) -> Score:
        await self._both.wait()
        return Score(reward=1.0, accuracy=1.0)


def test_answers_of_a_part_that_waits_are_scored_side_by_side() -> None:
    """One after another, a group of 16 would wait 16 times for a judge."""
    limits = CallLimits(name="pair", calls_at_once=2, timeout_seconds=2)
    waiting = Grading(graders=(Pair(),), calls=LimitedCalls(limits))
    mixture = Mixture({"scenes": Part(environment=Shapes(ShapesEnvironment(), 0), grading=waiting, share=1.0)})
    grading = Grading(graders=mixture.graders, parts=(waiting,))
    with closing(grading):
        scores = asyncio.run(grading.scores(mixture.tasks("train")[0], [[Turn(messages=(), text="1")]] * 2))
    assert [score.reward for score in scores] == [1, 1]


def test_parts_come_by_their_shares(tmp_path: Path) -> None:
    """Three rows of ten questions for one of a hundred scenes, and within the scenes each kind by its rows."""
    config = config_of(parts_in(tmp_path))
    tasks = make_environment(config).environment.tasks("train")
    kinds = kinds_of(tasks)
    drawn = Counter(kinds[row] for row in make_order(config, tasks).take(20_000))
    # four standard deviations of a binomial share are below .0125
    assert drawn["words"] / 20_000 == pytest.approx(0.75, abs=0.0125)
    for kind, count in Counter(kinds).items():
        if kind != "words":
            assert drawn[kind] / 20_000 == pytest.approx(0.25 * count / 100, abs=0.0125)
    weighed = config_of(parts_in(tmp_path), data={"kind_weights": {"words": 1 / 3}})
    halves = Counter(kinds[row] == "words" for row in make_order(weighed, tasks).take(20_000))
    assert halves[True] / 20_000 == pytest.approx(0.5, abs=0.015)


def test_a_mixture_trains_and_a_resumed_run_equals_one_never_stopped(tmp_path: Path) -> None:
    def rows(name: str, *stops: int) -> list[dict[str, float]]:
        for stop in stops:
            train(build(config_of(parts_in(tmp_path), run_dir=str(tmp_path / name), max_steps=stop, resume="auto")))
        found = read_metrics(tmp_path / name)
        kept = ("step", "reward", "grad_norm", "entropy", "response_tokens_mean")
        return [{key: row[key] for key in row if key in kept or key.startswith("accuracy/")} for row in found]

    straight = rows("straight", 4)
    assert straight == rows("resumed", 2, 4)
    assert any("accuracy/train/words" in row for row in straight)
    assert any(key.startswith("accuracy/train/scenes/") for row in straight for key in row)
    # the run and the rows of its evaluation are known only from its folder
    (of_run, gold) = evaluate_targets([str(tmp_path / "straight"), "gold"], [], EvalOptions(split="dev", quiet=True))
    assert {"words", "scenes/counting"} <= set(of_run.by_kind)
    assert (gold.accuracy.mean, gold.accuracy.n) == (1, 18)
    # other rows of a part are news to a resumed run
    again = config_of(parts_in(tmp_path), run_dir=str(tmp_path / "straight"), max_steps=5, resume="auto")
    (tmp_path / "rows.jsonl").write_text((tmp_path / "rows.jsonl").read_text().replace("is 3?", "are 3?"))
    with pytest.raises(DataError, match=r"file .*rows\.jsonl was \d+ bytes"):
        build(again)


def test_code_of_ones_own_in_a_part(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "fails.py").write_text(OWN)
    parts = parts_in(tmp_path)
    parts["words"]["reward"] = f"{tmp_path}/own.py:half"
    parts["sums"] = {"environment": f"{tmp_path}/own.py:Sums"}
    config = config_of(parts, run_dir=str(tmp_path / "run"), max_steps=1)
    graded = make_environment(config)
    assert reward_of(graded, "words", "7") == 0.5
    assert [reward_of(graded, "sums", text) for text in ("1", "2")] == [1, 0]
    graded.grading.close()
    lines = plan(config)
    assert {"train: 114 rows", "words, train: 10 rows", "sums, test: 4 rows"} <= set(lines)
    assert f"environment.parts.words.reward: {tmp_path}/own.py:half, tried on a training row" in lines
    run = build(config)
    train(run)
    assert {name.partition("=")[0] for name in run.fingerprint if name.startswith("code of")} == {
        "code of environment.parts.words.reward",
        "code of environment.parts.sums.environment",
    }
    parts["last"] = {**parts["words"], "reward": f"{tmp_path}/fails.py:half"}
    before = set(threading.enumerate())
    with pytest.raises(ScoreError, match="KeyError"):
        build(config_of(parts, run_dir=str(tmp_path / "again")))
    # the threads of the parts that were tried before have ended, or are told to
    started = set(threading.enumerate()) - before
    for thread in started:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in started)


def test_errors_name_their_part(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text("def large(task, text, images):\n    return 1e7\n")
    parts = parts_in(tmp_path)
    parts["words"]["reward"] = f"{tmp_path}/large.py:large"
    graded = make_environment(config_of(parts))
    with pytest.raises(DataError, match=r"^environment\.parts\.words: train/\d+: .*1e\+07"):
        reward_of(graded, "words", "0")
    parts["words"]["environment"]["test_files"] = ["none.jsonl"]
    with pytest.raises(DataError, match=r"environment\.parts\.words: environment\.test_files: no such file"):
        make_environment(config_of(parts)).environment.tasks("test")


def test_the_recipe_of_the_page(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    (block,) = [code for code in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "mixture" in code]
    (tmp_path / "recipe.yaml").write_text("model: {tiny: {}}\n" + block)
    rows = [{"problem": f"What is {n}?", "answer": str(n)} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"environment.parts.geometry.environment.{split}_files=[{tmp_path}/rows.jsonl]" for split in SPLITS]
    config = load_config([tmp_path / "recipe.yaml"], [*files, f"run_dir={tmp_path}/run"])
    assert "geometry, train: 19 rows" in plan(config)
    tasks = make_environment(config).environment.tasks("train")
    drawn = [tasks[row].id.partition("/")[0] for row in make_order(config, tasks).take(400)]
    assert drawn.count("geometry") / 400 == pytest.approx(0.75, abs=0.09)


def test_stages_of_a_part_are_refused(tmp_path: Path) -> None:
    stages = """
    default_starts = (5,)
    stages = (Stage(name="easy"), Stage(name="hard"))
    def at(self, stage):
        return self
"""
    staged = f"from fovea_gym.environments.stages import Stage\n{OWN}{stages}"
    (tmp_path / "own.py").write_text(staged)
    parts = parts_in(tmp_path) | {"sums": {"environment": f"{tmp_path}/own.py:Sums"}}
    with pytest.raises(ConfigError, match=r"^environment\.parts\.sums\b.*\bcurriculum\.enabled=false\b"):
        make_environment(config_of(parts))
    graded = make_environment(config_of(parts, curriculum={"enabled": False}))
    assert reward_of(graded, "sums", "1") == 1
    graded.grading.close()
