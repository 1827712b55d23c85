"""Causes for which a run collapses or does not move: each is made on purpose, and found by its own rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fovea.config.run import Config
from fovea.loop import train
from fovea.metrics.findings import RULES, find
from fovea.metrics.names import definition_of
from fovea.report.viewed_run import ViewedRun
from fovea.run import sampling
from fovea.run.context import Run
from fovea.run.signals import too_few_rows
from fovea_gym.types import Score, Task, Turn
from gym_tests.bandit import BanditEnvironment
from tests.fakes import bandit_run, printed_in
from tests.runs import HASH_REWARD, QUICK, ROOT, SMALL, train_here
from tests.tiny_models import save, tiny


def found(folder: Path) -> list[str]:
    return [finding.cause for finding in ViewedRun(folder).findings()]


FAST = [*QUICK, HASH_REWARD, "train.learning_rate=2e-2", "train.lr_warmup_steps=0", "algorithm.entropy_coef=0"]
KL = [*FAST, "max_steps=14", "rollout.max_new_tokens=4", "algorithm.kl.coef=1e-6"]
SURE = [*FAST, "train.learning_rate=6e-3", "max_steps=60", "rollout.max_new_tokens=1", "evaluate.image_controls=true"]
NOISE = [
    *(*SMALL, "evaluate.image_controls=false", "log.tensorboard=false", "warmup.max_steps=60", "max_steps=20"),
    *("rollout.max_new_tokens=8", "train.learning_rate=3e-3", "algorithm.entropy_coef=1"),
]


@pytest.mark.parametrize(
    ("settings", "causes"),
    [
        (SURE, {"The policy has stopped exploring", "The text suffices without the picture"}),
        (NOISE, {"The policy writes noise"}),
        ([*KL, "algorithm.kl.name=loss"], {"The policy has left its reference"}),
        ([*KL, "algorithm.kl.name=reward"], {"The KL penalty has run away"}),
    ],
    ids=["sure", "noise", "kl", "kl in the reward"],
)
def test_a_tiny_run_that_goes_wrong_says_why(tmp_path: Path, settings: Sequence[str], causes: set[str]) -> None:
    train_here("shapes", tmp_path / "run", *settings)
    assert causes <= set(found(tmp_path / "run"))
    ended = (tmp_path / "run/console.txt").read_text()
    assert all(f"{cause}: " in ended for cause in causes)


def test_a_model_that_prefers_banned_tokens_is_found(tmp_path: Path) -> None:
    parts = tiny("qwen3_vl")
    with torch.no_grad():
        parts.network.get_output_embeddings().weight[list(parts.processor.banned_ids)] *= 40
    model = f"model.path={save(parts, tmp_path / 'model')}"
    words = [*QUICK, "model.tiny=null", model, "rollout.max_new_tokens=4", "max_steps=20"]
    train_here("shapes", tmp_path / "run", *words)
    assert "The model wants to write banned tokens" in found(tmp_path / "run")


def test_an_engine_that_draws_at_another_temperature_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sampling.rollout_sampling
    monkeypatch.setattr(sampling, "rollout_sampling", lambda *given: replace(real(*given), temperature=0.5))
    words = [*QUICK, "rollout.max_new_tokens=4", "max_steps=2", "train.plain_update_every_steps=1"]
    train_here("shapes", tmp_path / "run", *words)
    assert found(tmp_path / "run") == ["Engine and trainer differ"]


@pytest.mark.parametrize(("staleness", "causes"), [(0.0, ["Engine and trainer differ"]), (1.0, [])])
def test_log_probs_of_older_weights_are_no_finding(staleness: float, causes: list[str]) -> None:
    steps = (1.0, 2.0)
    columns = {"mismatch/abs": (steps, (0.3, 0.4)), "staleness/max": (steps, (0.0, staleness))}
    assert [each.cause for each in find(columns, {})] == causes


def test_a_resumed_run_has_its_earlier_steps(tmp_path: Path) -> None:
    words = [*QUICK, "rollout.max_new_tokens=2", "checkpoint.every_steps=12"]
    train_here("shapes", tmp_path, *words, "max_steps=12")
    train_here("shapes", tmp_path, *words, "max_steps=20", "resume=auto")
    causes = {"No answer earns anything", "Answers are cut off at the limit"}
    assert causes <= set(found(tmp_path))
    ended = (tmp_path / "console.txt").read_text()
    assert all(f"{cause}: " in ended for cause in causes)
    assert "step 20: No answer earns anything" in ended


def earning(reward: Callable[[Task], float], accuracy: float = 0.5) -> type[BanditEnvironment]:
    class Earning(BanditEnvironment):
        def score(self, task: Task, turns: Sequence[Turn]) -> Score:
            return Score(reward=reward(task), accuracy=accuracy)

    return Earning


NOTHING_RIGHT = earning(lambda _: 0.0, accuracy=0.0)


def as_it_is(_: Run) -> None: ...


def forget_what_was_learnt(run: Run) -> None:
    update = run.policy.update

    async def forgetful(batch: object) -> Mapping[str, float]:
        metrics = await update(batch)  # type: ignore[arg-type]
        if run.policy.updates > 15:  # type: ignore[attr-defined]
            run.policy.table[:] = -20 * torch.eye(4).numpy()  # type: ignore[attr-defined]
        return metrics

    run.policy.update = forgetful  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize(
    ("environment", "broken", "causes"),
    [
        (BanditEnvironment, as_it_is, []),
        (NOTHING_RIGHT, as_it_is, ["No answer earns anything"]),
        (earning(lambda _: 0.5), as_it_is, ["Every answer earns the same"]),
        (earning(lambda task: float(task.answer == "b")), as_it_is, ["The answers to each prompt earn the same"]),
        (BanditEnvironment, forget_what_was_learnt, ["The reward has collapsed"]),
    ],
)
def test_a_run_is_diagnosed_by_its_own_cause_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: type, broken: Callable[[Run], None], causes: list[str]
) -> None:
    monkeypatch.setattr("tests.fakes.BanditEnvironment", environment)
    run = bandit_run(tmp_path, max_steps=30, train={"plain_update_every_steps": 1}, parity={"prompts": 0})
    broken(run)
    train(run)
    assert found(run.folder) == causes


def test_every_cause_is_in_the_docs_with_metrics_that_exist() -> None:
    docs = (ROOT / "docs/troubleshooting.md").read_text()
    for rule in RULES:
        assert rule.cause in docs
        names = [condition.metric for condition in rule.conditions]
        assert all(definition_of(name) or name.startswith("shuffled_images/") for name in names)


def test_more_prompts_a_step_than_rows_is_said_at_the_start() -> None:
    def of(prompts_per_step: int, max_epochs: int | None = None) -> Config:
        given = {"rollout": {"prompts_per_step": prompts_per_step}, "max_epochs": max_epochs}
        return Config.model_validate({"model": {"tiny": {}}, **given})

    many = "rollout.prompts_per_step=1000 is more than the 60 training rows, so rows repeat 17"
    assert str(too_few_rows(60, of(1000))).startswith(many)
    assert too_few_rows(60, of(60)) is None
    # in epochs, a step ends with the last of them
    assert "so a step takes each of them once; lower" in str(too_few_rows(60, of(1000, max_epochs=1)))
    assert "so rows repeat 2 times in one step" in str(too_few_rows(60, of(1000, max_epochs=2)))


def printed_by(run: Run) -> list[str]:
    lines = printed_in(run)
    with suppress(SystemExit):
        train(run)
    return lines


MANY = {"prompts_per_step": 17, "max_new_tokens": 1}


def test_a_run_prints_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fakes.BanditEnvironment", NOTHING_RIGHT)
    lines = printed_by(bandit_run(tmp_path, max_steps=25, rollout=MANY))
    report = (tmp_path / "report.html").read_text()
    for hint in ("is more than the 16 training rows", "No answer earns anything: reward is 0"):
        assert sum(hint in line for line in lines) == 2, "on the way, and at the end"
        assert report.count(hint.partition(":")[0]) == 1


def test_a_run_that_ends_early_prints_it_at_its_end_too(tmp_path: Path) -> None:
    lines = printed_by(bandit_run(tmp_path, max_steps=25, max_hours=1e-9, rollout=MANY))
    said = [place for place, line in enumerate(lines) if "is more than the 16 training rows" in line]
    assert len(said) == 2
    assert said[1] == len(lines) - 2, "before the line on how to go on"
    assert "max_hours=1e-09 is reached: saved at step 1" in lines[-1]
