"""Runs with the user's own code: docs/own.md, turns.md and agents.md as they stand, and rewards that fail midway."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from fovea.cli.main import sort_words
from fovea.config.loading import load_config
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.metrics.names import undefined
from fovea.report.samples import read_step, sample_steps
from fovea.wiring.run import build
from fovea_gym.adapters.mcp import McpConnection
from fovea_gym.errors import ScoreError
from fovea_gym.types import ImageRef, Score, Turn
from gym_tests.images import png
from gym_tests.rows.web import served
from tests.runs import ROOT

PAGE = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("own.md", "turns.md"))
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
FILES = {code.split("\n")[0].removeprefix("# "): code for kind, code in BLOCKS if kind != "sh" and code[0] == "#"}
COMMANDS = [shlex.split(code) for kind, code in BLOCKS if kind == "sh"]
AGENTS = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
FILES |= {name: text for text, name in re.findall(r"```(?:python|yaml)\n(# (\S+)\n.*?)```", AGENTS, re.DOTALL)}
TINY = "model.tiny={hidden_size: 32, num_layers: 1, vocabulary_size: 300}"
SMALL = [
    *(TINY, "max_steps=2", "run_dir=run", "log.progress=false", "log.tensorboard=false", "warmup=null"),
    *("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_new_tokens=4"),
    *("evaluate.test_size=2", "evaluate.dev_size=2", "evaluate.image_controls=false", "evaluate.shared_images=ignore"),
    "parity.prompts=1",
]
SHAPES = ["environment.train_size=8", "environment.dev_size=2", "environment.test_size=2"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for name, code in FILES.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def metrics() -> list[dict[str, float]]:
    rows = read_metrics(Path("run"))
    assert [name for row in rows for name in undefined(row)] == []
    return rows


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[-1])
def test_the_commands_of_the_page_run(words: list[str]) -> None:
    assert words[:2] == ["fovea", "train"]
    recipes, overrides = sort_words(words[2:])
    shapes = recipes == [Path("recipes/shapes.yaml")]
    small = SMALL + (SHAPES if shapes else [])
    names = {text.partition("=")[0] for text in small}
    train(build(load_config(recipes, [*(text for text in overrides if text.partition("=")[0] not in names), *small])))
    rows = metrics()
    assert len(rows) == 2
    if shapes:
        assert all(0 <= row["reward/short"] <= 1 for row in rows)
        assert all(row["reward"] == pytest.approx(row["accuracy"] + 0.1 * row["reward/short"]) for row in rows)


def test_the_tool_of_the_page_answers_its_demonstration() -> None:
    names: dict[str, Any] = {}
    exec(compile(FILES["magnifier.py"], "magnifier.py", "exec"), names)
    environment = names["Magnifier"]()
    splits = {split: environment.tasks(split) for split in ("train", "dev", "test")}
    assert len({task.id for tasks in splits.values() for task in tasks}) == 300
    task = splits["train"][0]
    call, answer = (Turn(messages=(), text=text) for text in environment.demonstration(task))
    (message,) = environment.reply(task, [call])
    assert message.parts[0].source.shape == (112, 112, 3)
    assert (message.parts[0].source[::8] == 0).all() == (task.answer == "yes")
    assert environment.reply(task, [call, answer]) is None
    assert environment.score(task, [call, answer]) == Score(reward=0.95, accuracy=1.0)


def test_the_frame_of_the_page_trains() -> None:
    (code,) = [code for kind, code in BLOCKS if kind == "python" and "photos.csv" in code]
    places = [("France", "Paris", 48.86, 2.35), ("Japan", "Tokyo", 35.69, 139.69)] * 5
    with served({f"/{index}.png": png((20 * index, 255 - 20 * index, 0), 64) for index in range(10)}) as site:
        urls = [f"{site.url}/{index}.png" for index in range(10)]
        frame = pd.DataFrame(places, columns=["country", "city", "lat", "lon"]).assign(image_url=urls)
        frame.to_csv("photos.csv", index=False)
        small = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in SMALL)}
        small |= {"data.allow_private_addresses": True, "curriculum.level_weights": []}
        small |= {"environment.level_key": None, "data.cache_dir": "cache"}
        replaced = re.sub(r"settings = \{.*?^\}", "settings = SETTINGS", code, flags=re.DOTALL | re.MULTILINE)
        assert replaced != code
        exec(compile(replaced, "own.md", "exec"), {"SETTINGS": small})
        assert len(set(site.asked)) > 2
    assert ["reward/country" in row for row in metrics()] == [True, True]


FAILS = """
calls = 0

def score(task, text, images):
    global calls
    calls += 1
    if images[0].size and calls % 3 == 0:
        raise ValueError(f"call {calls} fails")
    return {"answer": calls, "image_parts": [{"seen": 0.5}]}
"""


def test_a_broken_reward_ends_a_run_before_its_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("fovea.wiring.run.locate_model", load)
    raised = r"raised AttributeError: .* at broken\.py:2; fix it"
    for value, said in (("task.anwser", raised), ("images", "returned .* not a number")):
        Path("broken.py").write_text(f"def score(task, text, images):\n    return {value}\n", encoding="utf-8")
        with pytest.raises(ScoreError, match=rf"broken\.py:score {said}"):
            build(load_config([], [*SMALL, *SHAPES, "reward=broken.py:score"]))


def test_a_reward_that_fails_is_counted_and_listed() -> None:
    Path("fails.py").write_text(FAILS, encoding="utf-8")
    own = ["reward=fails.py:score", "reward_on_failure=drop", "rollout.prompts_per_step=3", "max_steps=2"]
    train(build(load_config([], [*SMALL, *SHAPES, *own])))
    rows = metrics()
    listed = list(map(json.loads, Path("run/unscored.jsonl").read_text(encoding="utf-8").splitlines()))
    by_step = [sum(entry["step"] == step for entry in listed) for step in (0, 1)]
    assert by_step == [row["groups/unscored"] for row in rows]
    assert sum(by_step) > 0
    assert any(entry["step"] is None for entry in listed), "a reading met a failure too"
    reason = re.compile(r"/\d+: fails\.py:score raised ValueError: call \d+ fails at fails\.py:8$")
    assert all(reason.search(entry["reason"]) for entry in listed)
    assert all(row["reward/image_1/seen"] == 0.5 for row in rows)
    records = [record for step in sample_steps(Path("run")) for record in read_step(Path("run"), step)]
    assert {str(answer.image_parts) for record in records for answer in record.answers} == {"({'seen': 0.5},)"}
    report = Path("run/report.html").read_text(encoding="utf-8")
    assert '"image_parts": [{"seen": 0.5}]' in report
    before = json.loads(Path("run/summary.json").read_text(encoding="utf-8"))["test"]["before"]
    missing = before["rows_unscored"]
    assert missing == 2 - before["accuracy"]["n"] > 0
    shown = Path("run/console.txt").read_text(encoding="utf-8")
    assert shown.count(f"not scored and left out: {listed[0]['reason']}") == 1, "printed at the first one only"
    for text in (report, shown):
        assert f"Rows not scored and left out: {missing} before RL" in text
        assert f"not scored and left out: {len(listed)} groups, episodes and held-out answers" in text


def test_a_run_that_fails_in_its_first_step_can_be_corrected_and_started_again() -> None:
    """Its trial call passes: the row that fails is another one."""
    broken = "def score(task, text, images):\n    return 1 if task.id == 'train/0' else task.anwser\n"
    Path("mine.py").write_text(broken, encoding="utf-8")
    settings = load_config([], [*SMALL, *SHAPES, "reward=mine.py:score", "evaluate.before_training=false"])
    with pytest.raises(ScoreError, match=r"^train/\d: mine\.py:score raised AttributeError"):
        train(build(settings))
    assert not Path("run").exists()
    Path("mine.py").write_text(broken.replace("task.anwser", "0.5"), encoding="utf-8")
    train(build(settings))
    assert len(metrics()) == 2


@pytest.mark.slow
def test_a_run_plays_the_environment_of_gymnasium() -> None:
    quiet = ["log.tensorboard=false", "log.progress=false", "evaluate.image_controls=false", "model.device=cpu"]
    summary = train(build(load_config([Path("strip.yaml")], quiet)))
    steps = read_metrics(Path("runs/strip"))
    assert summary.steps == steps[-1]["step"] == 2
    assert {each["episodes/failed"] for each in steps if "episodes/failed" in each} == {0}
    # a tiny model with random weights names no action, so that its episodes are as long as they may be
    assert summary.final is not None
    assert summary.final.parts == {"invalid_actions": (3.0,) * 8}


def test_the_server_of_the_page_gives_its_tool() -> None:
    (code,) = re.findall(r"```python\n(import sys\n.*?)```", AGENTS, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    connection, tools = names["squares"], names["tools"]
    assert isinstance(connection, McpConnection)
    (square,) = tools
    (picture,) = asyncio.run(square.call({"colour": "red"}, ()))
    connection.close()
    assert isinstance(picture, ImageRef)
    assert picture.source == Path("square.png").read_bytes()
