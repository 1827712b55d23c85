"""The overlapping loop on fakes: order, bound and barriers, whichever side is faster; and that it can be killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from fovea import loop
from fovea.data.bad_rows import BAD_ROWS_FILE, BadRows
from fovea.data.order import EpochOrder
from fovea.data.prompt_source import PromptSource
from fovea.errors import EngineError, TrainError
from fovea.metrics.log import read_metrics
from fovea.run.ahead import next_barrier
from fovea.run.checkpoint import Checkpoints, SavedCheckpoint
from fovea.run.context import Run
from fovea.types import Batch, Completion, Metrics, Request
from fovea.weights.base import SyncReport
from fovea_gym.errors import BadRowError
from fovea_gym.types import Message, Task
from gym_tests.bandit import BanditEnvironment
from tests.fakes import BanditRenderer, bandit_run, staged_run
from tests.runs import train_ahead, untimed

KILLED = "killed"
APART = {"placement": "disaggregated", "rollout_gpus": 1}


class Watched:
    """The services of a run, each call of which takes turns of the event loop, and what they did when."""

    def __init__(self, run: Run, *, draw_turns: int = 1, update_turns: int = 1) -> None:
        self.run = run
        self.draw_turns, self.update_turns = draw_turns, update_turns
        self.versions: dict[int, set[int]] = {}
        """Versions that drew each step."""
        self.overlaps: set[tuple[int, int]] = set()
        """Pairs of a step in training and one that was drawn meanwhile."""
        self.synced: list[int] = []
        self.drawing: list[int] = []
        self.training: int | None = None
        self.generate, self.update, self.sync = run.engine.generate, run.policy.update, run.weight_sync.sync
        run.engine.generate = self._generate  # type: ignore[method-assign]
        run.policy.update = self._update  # type: ignore[method-assign]
        run.weight_sync.sync = self._sync  # type: ignore[method-assign]

    async def _generate(self, request: Request) -> Sequence[Completion]:
        if not request.for_update or request.id.startswith("parity"):
            assert not self.drawing, "held-out rows beside a rollout would be answered by its weights"
            return await self.generate(request)
        _, step, _ = map(int, request.id.split("/"))
        self.drawing.append(step)
        assert set(self.drawing) == {step}, "one rollout after another"
        for _ in range(self.draw_turns):
            self._note()
            await asyncio.sleep(0)
        completions = await self.generate(request)
        self.drawing.remove(step)
        self.versions.setdefault(step, set()).update(each.version for each in completions)
        return completions

    async def _update(self, batch: Batch) -> Metrics:
        self.training = self.run.policy.updates  # type: ignore[attr-defined]
        for _ in range(self.update_turns):
            self._note()
            await asyncio.sleep(0)
        metrics = await self.update(batch)
        self.training = None
        return metrics

    async def _sync(self, version: int) -> SyncReport:
        assert not self.drawing, "a completion has one version"
        assert self.training is None, "of weights at rest"
        self.synced.append(version)
        return await self.sync(version)

    def _note(self) -> None:
        if self.training is not None:
            self.overlaps |= {(self.training, step) for step in self.drawing}


def overlapping(folder: Path, *, bound: int = 1, prompts: int = 8, **settings: object) -> Run:
    rollout = {"prompts_per_step": prompts, "samples_per_prompt": 8, "max_new_tokens": 1, "max_staleness_steps": bound}
    return bandit_run(folder, rollout=rollout, cluster=APART, **settings)


@pytest.mark.parametrize(
    ("bound", "versions", "overlaps"),
    [
        (0, [0, 1, 2, 3, 4, 5, 6], set()),
        (1, [0, 0, 1, 2, 4, 4, 5], {(0, 1), (1, 2), (2, 3), (4, 5), (5, 6)}),
        (2, [0, 0, 0, 2, 4, 4, 4], {(0, 1), (2, 3), (4, 5)}),
        (9, [0, 0, 0, 0, 4, 4, 4], {(0, 1), (4, 5)}),
    ],
)
@pytest.mark.parametrize(
    "turns", [{"draw_turns": 60, "update_turns": 5}, {"update_turns": 60}], ids=["slow engine", "slow policy"]
)
def test_each_step_is_drawn_by_the_version_that_the_settings_say(
    bound: int, versions: list[int], overlaps: set[tuple[int, int]], turns: dict[str, int], tmp_path: Path
) -> None:
    """With a checkpoint after step 4, before which step 4 may not be drawn."""
    watched = Watched(overlapping(tmp_path, bound=bound, max_steps=7, checkpoint={"every_steps": 4}), **turns)
    train_ahead(watched.run)
    assert [watched.versions[step] for step in range(7)] == [{version} for version in versions]
    assert overlaps <= watched.overlaps
    assert all(training < drawn <= training + bound for training, drawn in watched.overlaps)
    staleness = [(row["staleness/mean"], row["staleness/max"]) for row in read_metrics(tmp_path)]
    assert staleness == [(step - version, step - version) for step, version in enumerate(versions)]
    assert watched.synced[-1] == 7, "the evaluation of the end is one of the newest weights"


SECONDS = 0.6
"""Of a slow call: much longer than all else of a step, also on a machine with other work."""


@pytest.mark.parametrize("slow", ["engine", "policy"])
def test_the_time_for_which_either_side_waits_is_measured(slow: str, tmp_path: Path) -> None:
    run = overlapping(tmp_path, prompts=1, max_steps=4)
    service, name = {"engine": (run.engine, "generate"), "policy": (run.policy, "update")}[slow]
    at_once = getattr(service, name)

    async def slowly(given: object) -> object:
        await asyncio.sleep(SECONDS)
        return await at_once(given)

    setattr(service, name, slowly)
    train_ahead(run)
    # before the first step nothing is drawn ahead, and during the last one nothing is left to draw
    for row in read_metrics(tmp_path)[1:-1]:
        waited_for = {"engine": row["seconds/idle_update"], "policy": row["seconds/idle_rollout"]}
        longest = waited_for.pop(slow)
        # the other side works meanwhile, for a few milliseconds or, on a machine with other work, a few tenths of a
        # second; no bound above, for the same reason
        assert longest > SECONDS / 2
        assert waited_for.popitem()[1] < longest


def test_dev_rows_are_read_by_the_newest_weights(tmp_path: Path) -> None:
    """Within one interval of checkpoints, whose end comes later."""
    run = overlapping(tmp_path, max_steps=5, evaluate={"every_steps": 2, "dev_size": 4, "image_controls": False})
    watched = Watched(run, update_turns=60)
    read: list[tuple[int, int]] = []
    evaluate = run.evaluator.evaluate

    async def noted(*args: object) -> object:
        read.append((run.policy.updates, run.engine.version))  # type: ignore[attr-defined]
        return await evaluate(*args)  # type: ignore[arg-type]

    run.evaluator.evaluate = noted  # type: ignore[method-assign, assignment]
    train_ahead(run)
    assert read == [(0, 0), (2, 2), (4, 4), (5, 5)]
    assert [watched.versions[step] for step in range(5)] == [{0}, {0}, {2}, {2}, {4}]


def test_the_next_barrier_is_the_next_multiple_of_an_interval_or_the_end(tmp_path: Path) -> None:
    every = {"checkpoint": {"every_steps": 5}, "evaluate": {"every_steps": 4}}
    config = bandit_run(tmp_path, max_steps=13, **every).config
    expected = [4, 4, 4, 4, 5, 8, 8, 8, 10, 10, 12, 12, 13]
    assert [next_barrier(config, step) for step in range(13)] == expected


def test_a_bound_of_0_is_the_loop_that_takes_turns(tmp_path: Path) -> None:
    ahead, in_turn = overlapping(tmp_path / "ahead", bound=0), bandit_run(tmp_path / "in_turn")
    train_ahead(ahead)
    loop.train(in_turn)
    theirs, ours = (untimed(tmp_path / name) for name in ("in_turn", "ahead"))
    assert ours == [row | {"staleness/mean": 0, "staleness/max": 0} for row in theirs]
    np.testing.assert_array_equal(ahead.policy.table, in_turn.policy.table)  # type: ignore[attr-defined]


def test_a_bandit_learns_from_stale_completions(tmp_path: Path) -> None:
    assert train_ahead(overlapping(tmp_path, bound=2)).final.accuracy == 1.0


def killed_at(update: int, run: Run) -> Run:
    go_on = run.policy.update

    async def dies(batch: Batch) -> Metrics:
        if run.policy.updates == update:  # type: ignore[attr-defined]
            raise TrainError(KILLED)
        return await go_on(batch)

    run.policy.update = dies  # type: ignore[method-assign]
    return run


@pytest.mark.parametrize(
    ("killed_in", "turns"), [(3, {"update_turns": 60}), (5, {"draw_turns": 9}), (9, {"update_turns": 60})], ids=str
)
def test_a_killed_and_resumed_run_equals_a_whole_one(killed_in: int, turns: dict[str, int], tmp_path: Path) -> None:
    """With a curriculum that goes by rewards, dynamic sampling, and rows drawn ahead when it dies."""
    settings: dict[str, object] = {
        "max_steps": 12,
        "checkpoint": {"every_steps": 4},
        "algorithm": {"dynamic_sampling": {"max_gen_batches": 3}},
        "curriculum": {"advance": "success", "success_rate": 0.1, "success_window_steps": 2},
        "rollout": {**{"prompts_per_step": 8, "samples_per_prompt": 8, "max_new_tokens": 1}, "max_staleness_steps": 2},
        "cluster": APART,
    }
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = Watched(staged_run(whole, **settings)).run
    train_ahead(expected)
    with pytest.raises(TrainError, match=KILLED):
        train_ahead(killed_at(killed_in, Watched(staged_run(broken, **settings), **turns).run))
    resumed = Watched(staged_run(broken, resume=True, **settings), **turns).run
    assert resumed.resumed is not None
    assert resumed.resumed.step == killed_in - killed_in % 4
    train_ahead(resumed)
    assert untimed(broken) == untimed(whole)
    assert {row["curriculum/stage"] for row in read_metrics(whole)} == {1, 2, 3}
    np.testing.assert_array_equal(resumed.policy.table, expected.policy.table)  # type: ignore[attr-defined]


def test_a_run_that_is_told_to_end_puts_back_what_it_has_drawn_ahead(tmp_path: Path) -> None:
    """By a time limit that is over after the first step, when two more steps are drawn or being drawn."""
    ahead, in_turn = tmp_path / "ahead", tmp_path / "in_turn"
    limited = {"max_hours": 1e-9, "max_steps": 9}
    with pytest.raises(SystemExit) as ended:
        train_ahead(Watched(overlapping(ahead, bound=2, **limited), update_turns=60).run)
    with pytest.raises(SystemExit):
        loop.train(bandit_run(in_turn, **limited))
    assert ended.value.code == 0
    saved, expected = (cast(SavedCheckpoint, Checkpoints(folder, keep=2).latest()) for folder in (ahead, in_turn))
    assert saved.step == expected.step == 1
    for key in ("order", "curriculum", "bad_rows", "unscored_bytes"):
        assert saved.state[key] == expected.state[key]


def test_the_evaluation_behind_a_time_limit_is_of_the_last_weights(tmp_path: Path) -> None:
    evaluated = {"after_max_hours": True, "image_controls": False, "shared_images": "ignore"}
    watched = Watched(overlapping(tmp_path, max_hours=1e-9, max_steps=9, evaluate=evaluated), update_turns=60)
    with pytest.raises(SystemExit):
        train_ahead(watched.run)
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == watched.synced[-1] == 1
    np.testing.assert_array_equal(watched.run.engine.table, watched.run.policy.table)  # type: ignore[attr-defined]


class TornEnvironment(BanditEnvironment):
    """Environment with bad rows."""

    def prompt(self, task: Task) -> list[Message]:
        if int(task.id.rpartition("/")[2]) % 3 == 0:
            raise BadRowError(f"{task.id}: it is torn", "torn")
        return super().prompt(task)


def torn_run(folder: Path, *, resume: bool = False, **settings: object) -> Run:
    run = overlapping(folder, bound=2, prompts=3, resume=resume, max_steps=3, **settings)
    bad_rows = BadRows(folder, resume_at=run.resumed.state["bad_rows"] if run.resumed else 0)
    environment = TornEnvironment()
    limits: Any = {"max_prompt_tokens": 10, "on_bad_row": "skip", "cache_gib": 0.0, "bad_rows": bad_rows}
    source = PromptSource(environment.tasks("train"), environment, BanditRenderer(), **limits)
    sources = replace(run.sources, train=source, bad_rows=bad_rows)
    return replace(run, sources=sources, stream=replace(run.stream, source=source))


def test_a_bad_row_that_was_drawn_ahead_is_put_back(tmp_path: Path) -> None:
    """It is listed when the resumed run comes to it, once."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_ahead(torn_run(whole))
    with pytest.raises(SystemExit):
        train_ahead(Watched(torn_run(broken, max_hours=1e-9), update_turns=60).run)
    found_by_step_1 = (broken / BAD_ROWS_FILE).read_text()
    train_ahead(torn_run(broken, resume=True))
    assert 0 < len(found_by_step_1) < len((whole / BAD_ROWS_FILE).read_text())
    assert (broken / BAD_ROWS_FILE).read_text() == (whole / BAD_ROWS_FILE).read_text()
    counts = [[row["data/rows_skipped"] for row in read_metrics(folder)] for folder in (broken, whole)]
    assert counts[0] == counts[1]


def test_an_error_of_a_rollout_ahead_ends_the_run(tmp_path: Path) -> None:
    run = overlapping(tmp_path)
    generate = run.engine.generate

    async def broken(request: Request) -> Sequence[Completion]:
        if request.for_update and request.id.startswith("0/2/"):
            raise EngineError("out of luck")
        return await generate(request)

    run.engine.generate = broken  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="out of luck"):
        train_ahead(run)
    assert len(read_metrics(tmp_path)) == 2


def test_a_run_ends_with_its_rows(tmp_path: Path) -> None:
    """Of 16 rows, each once: two steps, however many may be drawn ahead."""
    run = overlapping(tmp_path, bound=3)
    order = EpochOrder(16, seed=0, shuffle=True, max_epochs=1)
    watched = Watched(replace(run, stream=replace(run.stream, order=order)))
    train_ahead(watched.run)
    steps = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert (len(read_metrics(tmp_path)), watched.synced[-1], steps) == (2, 2, 2)
