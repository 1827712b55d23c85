"""Hints for a run that learns nothing: groups without signal for many steps, or too few rows for a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fovea.config.run import Rollout

SILENT_STEPS = 20
"""Consecutive steps without any signal after which a run says so, once."""


class SignalWatch:
    """Counts consecutive steps in which no group had a signal, and says once what to change."""

    def __init__(self) -> None:
        self._rewards: list[float] = []
        """Mean rewards of the silent steps so far."""
        self._has_spoken = False

    def hint(self, metrics: Mapping[str, float], rollout: Rollout) -> str | None:
        """The hint that the metrics of the step just taken complete; None nearly always."""
        reward, silent_frac = metrics["reward"], metrics.get("groups/without_signal_frac")
        # groups of one have no such metric: there, equal rewards in all steps say the same
        is_silent = reward in (self._rewards[-1:] or [reward]) if silent_frac is None else silent_frac == 1
        self._rewards = [*self._rewards, reward] if is_silent else []
        if self._has_spoken or len(self._rewards) < SILENT_STEPS:
            return None
        self._has_spoken = True
        advice = _advice(self._rewards, rollout)
        return f"no group had a signal for {SILENT_STEPS} steps, so that nothing is learned: {advice}"


def _advice(rewards: Sequence[float], rollout: Rollout) -> str:
    if max(rewards) > min(rewards):
        return (
            f"the answers to each prompt earned the same. Raise rollout.temperature (now {rollout.temperature:g}) or "
            f"rollout.samples_per_prompt (now {rollout.samples_per_prompt}), or take rows of middling difficulty"
        )
    if rewards[-1] <= 0:
        return (
            f"every answer earned {rewards[-1]:g}. Read some in samples/: if right ones earn nothing, correct the "
            "reward or the prompt; if none is right, begin with easier rows, a warm-up or a stronger model"
        )
    return f"every answer earned {rewards[-1]:g}: take harder rows, or correct a reward that is a constant"


def too_few_rows(num_rows: int, rollout: Rollout) -> str | None:
    """A warning where a step draws more prompts than there are training rows; None where it does not."""
    wanted = rollout.prompts_per_step
    if wanted <= num_rows:
        return None
    return (
        f"rollout.prompts_per_step={wanted} is more than the {num_rows} training rows, so that rows come "
        f"{-(-wanted // num_rows)} times in one step; lower it to {num_rows} or less, and raise "
        "rollout.samples_per_prompt for more answers to each"
    )
