"""Settings of the curriculum."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

from fovea_gym.settings.base import Fraction, NonNegativeFloat, PositiveInt, Section


class Curriculum(Section):
    """Curriculum: stages of the environment (geospot has five), and the difficulty of its rows in each stage."""

    enabled: bool = True
    """Go through the stages; false: stay in the last stage from the first step on."""
    advance: Literal["step", "success"] = "step"
    """Criterion for the next stage: the number of steps, or the mean reward."""
    starts: tuple[PositiveInt, ...] | None = None
    """First step of each later stage (advance=step); default: the environment's (geospot: 100, 300, 600, 1000)."""
    success_rate: Fraction = 0.8
    """Mean reward that ends a stage (advance=success), over success_window_steps steps."""
    success_window_steps: PositiveInt = 20
    """Number of steps of a stage over which the mean reward is taken (advance=success)."""
    level_weights: tuple[dict[str, NonNegativeFloat], ...] = ()
    """Sampling weights of the difficulty levels, one table per stage (0: never; a level not named: 1)."""

    @property
    def tables_in_use(self) -> tuple[dict[str, float], ...]:
        """Level tables of the stages that a run goes through.

        Without the curriculum this is the last table, or none if all its weights are 1: such a table may name levels
        that no row has, so that a recipe's curriculum can be turned off for other rows.
        """
        if self.enabled:
            return self.level_weights
        return tuple(table for table in self.level_weights[-1:] if any(weight != 1 for weight in table.values()))

    def contradictions(self) -> Iterator[str]:
        if self.starts is not None and any(later <= earlier for earlier, later in pairwise(self.starts)):
            yield f"curriculum.starts={list(self.starts)} must increase; sort it, with each step once"
