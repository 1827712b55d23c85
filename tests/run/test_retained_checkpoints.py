"""The checkpoints that outlive newer ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from fovea.config.run import Config
from fovea.evaluation.evaluator import Evaluator
from fovea.loop import train
from fovea.metrics.progress import Progress
from fovea.run.checkpoint import RetainedCheckpoints
from fovea.types import Batch, Evaluation, Metrics
from tests.fakes import BanditPolicy, bandit_run


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("stop_after", [30, 14], ids=["in one go", "resumed"])
def test_the_checkpoint_of_the_best_dev_reading_is_kept(
    stop_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read at steps 6, 12, ..., of which 12 is the best; checkpoints come every 10 steps."""
    readings = iter([0.0, 0.3, 0.9, *([0.5] * 20)])
    if stop_after < 30:
        readings = iter([0.0, 0.3, 0.9, 0.5, *([0.5] * 20)])

    async def evaluate(self: Evaluator, *_: object, **__: object) -> Evaluation:
        value = next(readings)
        return Evaluation(accuracies={"all": (value,)}, rewards=(value,))

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    settings: Mapping[str, object] = {
        "checkpoint": {"every_steps": 10, "keep_best": True},
        "evaluate": {"every_steps": 6, "image_controls": False, "shared_images": "ignore"},
    }
    train(bandit_run(tmp_path, max_steps=stop_after, **settings))
    if stop_after < 30:
        train(bandit_run(tmp_path, resume=True, max_steps=30, **settings))
    assert saved_steps(tmp_path) == [12, 20, 30]


def test_the_last_checkpoint_before_updates_fail_is_kept_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = BanditPolicy.update

    async def failing_from_16_on(self: BanditPolicy, batch: Batch) -> Metrics:
        metrics = await update(self, batch)
        return metrics | {"updates_skipped": float(self.updates >= 16)}

    said: list[str] = []
    monkeypatch.setattr(BanditPolicy, "update", failing_from_16_on)
    monkeypatch.setattr(Progress, "print", lambda _, text: said.append(str(text)))
    train(bandit_run(tmp_path, checkpoint={"every_steps": 3}))
    assert saved_steps(tmp_path) == [15, 27, 30]
    assert f"the checkpoint before it, {tmp_path / 'checkpoints' / 'step-15'}, is kept" in "".join(said)


def test_once_updates_are_taken_again_nothing_is_kept_beyond() -> None:
    kept = RetainedCheckpoints().after_step(5, {"updates_skipped": 1.0}, keep_best=False)
    assert kept.after_step(6, {"updates_skipped": 1.0}, keep_best=False).steps([2, 4, 6]) == {4}
    assert kept.after_step(6, {"updates_skipped": 0.0}, keep_best=False).steps([2, 4, 6]) == set()


def test_without_dev_readings_there_is_no_best() -> None:
    with pytest.raises(ValueError, match=r"keep_best=true .* evaluate\.every_steps=0 takes none; set evaluate\.every"):
        Config.model_validate({"model": {"tiny": {}}, "checkpoint": {"keep_best": True}})
