"""A mixture: every task goes to its own environment and graders, and parts come by their shares."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from fovea.build.data import make_order
from fovea.build.environment import GradedEnvironment
from fovea.build.mixture import mix
from fovea.build.run import build
from fovea.config.run import Config
from fovea.data.order import kinds_of, place_of
from fovea.environments.shapes.questions import KINDS
from fovea.errors import ConfigError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.types import Turn

ROLLOUT = {"prompts_per_step": 8, "samples_per_prompt": 2, "max_new_tokens": 4}
REST = {
    "log": {"tensorboard": False, "progress": False},
    "evaluate": {"image_controls": False, "shared_images": "ignore", "test_size": 6},
    "checkpoint": {"every_steps": 2},
    "algorithm": {"entropy_coef": 0.01, "max_groups_without_signal": 8},
}


def config_of(environment: dict[str, object], **settings: object) -> Config:
    model = {"tiny": {"hidden_size": 32, "num_layers": 1, "head_dim": 16}}
    return Config.model_validate({"model": model, "environment": environment, "rollout": ROLLOUT, **REST, **settings})


def parts(folder: Path) -> dict[str, tuple[float, Config]]:
    """Ten questions in a file at a share of 3, and a hundred scenes at a share of 1."""
    rows = [{"question": f"How many is {n}?", "answer": str(n)} for n in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [str(folder / "rows.jsonl")]
    words = {"name": "vqa", "train_files": files, "dev_files": files, "test_files": files}
    scenes = {"name": "shapes", "train_size": 100, "dev_size": 8, "test_size": 8}
    return {"words": (3.0, config_of(words)), "scenes": (1.0, config_of(scenes))}


@pytest.fixture
def mixed(tmp_path: Path) -> GradedEnvironment:
    return mix(parts(tmp_path))


def test_every_task_goes_to_its_own_environment(mixed: GradedEnvironment, tmp_path: Path) -> None:
    environment = mixed.environment
    tasks = environment.tasks("train")
    assert len(tasks) == 110
    assert len({task.id for task in tasks}) == 110
    assert Counter(kind.partition("/")[0] for kind in kinds_of(tasks)) == {"words": 10, "scenes": 100}
    assert set(kinds_of(tasks)) == {"words", *(f"scenes/{kind}" for kind in KINDS)}
    # every prefix holds a word for ten scenes
    words = [index for index, task in enumerate(tasks) if task.kind == "words"]
    assert words == [*range(5, 110, 11)]
    place = place_of(tasks, words[2])
    assert place is not None
    assert place.where == "rows.jsonl line 3"
    assert place_of(tasks, 50) is None
    for index in (words[2], 50, 109):
        task = tasks[index]
        assert task.kind == kinds_of(tasks)[index]
        answer = environment.target(task)
        assert environment.demonstration(task) == (answer,)
        turns = [[Turn(messages=tuple(environment.prompt(task)), text=text)] for text in (answer, "no idea")]
        right, wrong = asyncio.run(mixed.grading.scores(task, turns))
        assert (right.reward, wrong.reward) == (1, 0)
        assert len(task.images) == (0 if index in words else 1)


def test_parts_come_by_their_shares(mixed: GradedEnvironment) -> None:
    """Three rows of ten questions for one of a hundred scenes, and within the scenes each kind by its rows."""
    tasks = mixed.environment.tasks("train")
    kinds = kinds_of(tasks)
    drawn = Counter(kinds[row] for row in make_order(config_of({"name": "shapes"}), tasks).take(20_000))
    # four standard deviations of a binomial share are below .0125
    assert drawn["words"] / 20_000 == pytest.approx(0.75, abs=0.0125)
    for kind, count in Counter(kinds).items():
        if kind != "words":
            assert drawn[kind] / 20_000 == pytest.approx(0.25 * count / 100, abs=0.0125)
    weighed = config_of({"name": "shapes"}, data={"kind_weights": {"words": 1 / 3}})
    halves = Counter(kinds[row] == "words" for row in make_order(weighed, tasks).take(20_000))
    assert halves[True] / 20_000 == pytest.approx(0.5, abs=0.015)


def test_what_leaves_no_room_for_shares(mixed: GradedEnvironment, tmp_path: Path) -> None:
    once = config_of({"name": "shapes"}, max_epochs=2)
    with pytest.raises(ConfigError, match="a mixture draws its parts by their shares, which max_epochs"):
        make_order(once, mixed.environment.tasks("train"))
    words = parts(tmp_path)["words"][1]
    for name, share in (("a/b", 1.0), ("a", 0.0)):
        with pytest.raises(ConfigError, match="a name without a slash, and a share above 0"):
            mix({name: (share, words)})


def test_a_mixture_trains_and_a_resumed_run_equals_one_never_stopped(tmp_path: Path) -> None:
    def rows(name: str, *stops: int) -> list[dict[str, float]]:
        for stop in stops:
            config = config_of({"name": "shapes"}, run_dir=str(tmp_path / name), max_steps=stop, resume="auto")
            train(build(config, mix(parts(tmp_path))))
        found = read_metrics(tmp_path / name)
        kept = ("step", "reward", "grad_norm", "entropy", "response_tokens_mean")
        return [{key: row[key] for key in row if key in kept or key.startswith("accuracy/")} for row in found]

    straight = rows("straight", 4)
    assert straight == rows("resumed", 2, 4)
    assert any("accuracy/train/words" in row for row in straight)
    assert any(key.startswith("accuracy/train/scenes/") for row in straight for key in row)
