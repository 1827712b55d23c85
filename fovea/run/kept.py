"""Which checkpoints are kept beyond the newest ones: the best one, and the last one before updates began to fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

DEV_READING = "accuracy/dev"
"""The metric by which a checkpoint is the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Steps by which it is decided; part of every checkpoint."""

    best_step: int | None = None
    """Step of the best dev reading; None without `checkpoint.keep_best`, or before the first reading."""
    best_reading: float = 0.0
    skipped_since: int | None = None
    """First step of the present run of skipped updates; None where the last update was taken."""

    def after_step(self, step: int, metrics: Mapping[str, float], *, keep_best: bool) -> Kept:
        """The same after another step, whose metrics hold a dev reading or not."""
        kept = self
        if not metrics.get("updates_skipped", 0.0):
            kept = replace(kept, skipped_since=None)
        elif kept.skipped_since is None:
            kept = replace(kept, skipped_since=step)
        reading = metrics.get(DEV_READING)
        if keep_best and reading is not None and (kept.best_step is None or reading > kept.best_reading):
            kept = replace(kept, best_step=step, best_reading=reading)
        return kept

    def steps(self, saved: Sequence[int]) -> set[int]:
        """The steps, among those of saved checkpoints, whose checkpoints are kept."""
        before = [step for step in saved if self.skipped_since is not None and step < self.skipped_since]
        return {step for step in saved if step == self.best_step} | set(before[-1:])
