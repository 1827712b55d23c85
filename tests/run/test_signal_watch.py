"""What a run says when it learns nothing: once, with the reason and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fovea.config.sections import Rollout
from fovea.loop import train
from fovea.run.signals import SILENT_STEPS, SignalWatch, too_few_rows
from fovea.types import Score, Task, Turn
from tests.fakes import BanditEnvironment, bandit_run

ROLLOUT = Rollout(prompts_per_step=4, samples_per_prompt=8)


def hints(rewards: Sequence[float], silent_frac: float | None = 1.0) -> list[tuple[int, str]]:
    watch, found = SignalWatch(), []
    for step, reward in enumerate(rewards, start=1):
        metrics = {"reward": reward} | ({} if silent_frac is None else {"groups/without_signal_frac": silent_frac})
        if hint := watch.hint(metrics, ROLLOUT):
            found.append((step, hint))
    return found


@pytest.mark.parametrize(
    ("rewards", "silent_frac", "says"),
    [
        ([0.0] * 60, 1.0, "every answer earned 0. Read some in samples/"),
        ([0.0] * 60, None, "every answer earned 0. Read some in samples/"),
        ([1.0] * 60, 1.0, "every answer earned 1: take harder rows"),
        ([0.25, 0.75] * 30, 1.0, r"Raise rollout.temperature (now 1) or rollout.samples_per_prompt (now 8)"),
    ],
)
def test_each_reason_has_its_sentence_and_comes_once(
    rewards: Sequence[float], silent_frac: float | None, says: str
) -> None:
    ((step, hint),) = hints(rewards, silent_frac)
    assert step == SILENT_STEPS
    assert says in hint


def test_a_run_with_some_signal_hears_nothing() -> None:
    assert hints([0.0] * 60, 0.9) == []
    assert hints([0.25, 0.75] * 30, None) == []
    assert hints([0.0] * (SILENT_STEPS - 1)) == []


def test_more_prompts_a_step_than_rows_is_said_at_the_start(tmp_path: Path) -> None:
    warning = too_few_rows(60, Rollout(prompts_per_step=1000))
    assert warning is not None
    assert warning.startswith("rollout.prompts_per_step=1000 is more than the 60 training rows, so that rows come 17")
    assert too_few_rows(60, Rollout(prompts_per_step=60)) is None


class NothingRight(BanditEnvironment):
    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        return Score(reward=0.0, accuracy=0.0)


def test_a_run_prints_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fakes.BanditEnvironment", NothingRight)
    run = bandit_run(tmp_path, max_steps=25, rollout={"prompts_per_step": 17, "max_new_tokens": 1})
    lines: list[str] = []
    run.progress.print = lambda line: lines.append(str(line))  # type: ignore[method-assign]
    train(run)
    report = (run.folder / "report.html").read_text()
    for hint in ("is more than the 16 training rows", "no group had a signal for 20 steps"):
        said = [place for place, line in enumerate(lines) if hint in line]
        assert len(said) == 2, "on the way, and at the end"
        assert report.count(hint) == 1


def test_a_run_that_ends_early_prints_it_at_its_end_too(tmp_path: Path) -> None:
    run = bandit_run(tmp_path, max_steps=25, max_hours=1e-9, rollout={"prompts_per_step": 17, "max_new_tokens": 1})
    lines: list[str] = []
    run.progress.print = lambda line: lines.append(str(line))  # type: ignore[method-assign]
    with pytest.raises(SystemExit, match="0"):
        train(run)
    said = [place for place, line in enumerate(lines) if "is more than the 16 training rows" in line]
    assert len(said) == 2
    assert said[1] == len(lines) - 2, "before the line on how to go on"
