"""The curriculum of a run: the stage of each step, its metrics, and its state for checkpoints.

An environment with `Stages` has one grader per stage and stays stateless. Rows with levels are sampled by the level
weights of the stage. Without stages and levels there is one stage. Held-out rows are always scored by the last grader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TypedDict

from fovea.config.curriculum import Curriculum
from fovea.types import Metrics
from fovea_gym.environments.stages import Stage, Stages
from fovea_gym.errors import ConfigError, DataError


class CurriculumState(TypedDict):
    """The state of a curriculum in a checkpoint; JSON-serialisable."""

    stage: int
    recent_rewards: list[float]


class CurriculumProgress:
    """The current stage of a run, and the rule that decides when the next stage begins."""

    def __init__(self, own: Stages | None = None, settings: Curriculum | None = None) -> None:
        """`own` holds the stages of the environment."""
        self._settings = settings or Curriculum()
        own = own or Stages()
        self._stages = _all_stages(own.stages, self._settings)
        self._starts = _starts(own.default_starts, self._settings, len(self._stages))
        self._recent: deque[float] = deque(maxlen=self._settings.success_window_steps)
        self._stage = 0 if self._settings.enabled else len(self._stages) - 1

    @property
    def stage(self) -> int:
        """The current stage, counted from 0."""
        return self._stage

    @property
    def level_weights(self) -> Mapping[str, float]:
        """The relative frequency of each level; 1 for levels that are not named."""
        tables = self._settings.tables_in_use
        return tables[self._stage if self._settings.enabled else -1] if tables else {}

    def begin_step(self, step: int) -> str | None:
        """Advance to the stage of a step (counted from 0); return a line for the log if the stage has changed."""
        before = self._stage
        if self._settings.enabled:
            by_success = self._settings.advance == "success"
            self._stage = self._by_success() if by_success else sum(start <= step for start in self._starts)
        if self._stage == before and step > 0:
            return None
        return self.describe() if self._says_something else None

    def end_step(self, reward: float) -> None:
        """Add the mean reward of a step to the success window."""
        self._recent.append(reward)

    def metrics(self) -> Metrics:
        """The stage (counted from 1) and its numbers; empty if there is only one stage."""
        if not self._says_something:
            return {}
        facts = {f"curriculum/{name}": value for name, value in self._stages[self._stage].facts.items()}
        levels = {f"curriculum/level_weight_{level}": weight for level, weight in self.level_weights.items()}
        return {"curriculum/stage": float(self._stage + 1)} | facts | levels

    def describe(self) -> str:
        """One line about the current stage: `stage 2 of 5, country refined: tolerance_km 200, weight_country 1`."""
        stage, levels = self._stages[self._stage], self.level_weights
        facts = [f"{name} {value:.3g}" for name, value in (*stage.facts.items(), *levels.items())]
        return f"stage {self._stage + 1} of {len(self._stages)}, {stage.name}: {', '.join(facts) or 'no weights'}"

    def state(self) -> CurriculumState:
        return {"stage": self._stage, "recent_rewards": list(self._recent)}

    def restore(self, state: CurriculumState) -> None:
        """Continue from the state in a checkpoint."""
        if not 0 <= state["stage"] < len(self._stages):
            raise DataError(
                f"the checkpoint is in stage {state['stage'] + 1}, but there are {len(self._stages)}; resume with the "
                "curriculum and environment that the run began with"
            )
        self._stage = state["stage"] if self._settings.enabled else len(self._stages) - 1
        self._recent = deque(state["recent_rewards"], maxlen=self._settings.success_window_steps)

    @property
    def _says_something(self) -> bool:
        return len(self._stages) > 1 or bool(self._settings.level_weights)

    def _by_success(self) -> int:
        full = len(self._recent) == self._recent.maxlen
        done = full and sum(self._recent) / len(self._recent) >= self._settings.success_rate
        if not done or self._stage == len(self._stages) - 1:
            return self._stage
        self._recent.clear()  # the next stage is judged by its own steps
        return self._stage + 1


def _all_stages(own: Sequence[Stage], settings: Curriculum) -> Sequence[Stage]:
    tables = settings.level_weights
    if own and tables and len(own) != len(tables):
        raise ConfigError(
            f"curriculum.level_weights has {len(tables)} tables, but the environment has {len(own)} stages; write one "
            "table per stage"
        )
    return own or [Stage(name=f"levels {number}") for number in range(1, len(tables) + 1)] or [Stage(name="all")]


def _starts(own: Sequence[int], settings: Curriculum, num_stages: int) -> Sequence[int]:
    starts = own if settings.starts is None else settings.starts
    if num_stages == 1 and (settings.starts is not None or settings.advance == "success"):
        key, given = ("advance", "success") if settings.starts is None else ("starts", list(settings.starts))
        raise ConfigError(
            f"curriculum.{key}={given}, but this run has only one stage: several stages need curriculum.level_weights, "
            f"or the environment geospot with its built-in reward; remove curriculum.{key}"
        )
    if settings.enabled and settings.advance == "step" and len(starts) != num_stages - 1:
        raise ConfigError(
            f"curriculum.starts has {len(starts)} steps for {num_stages} stages, but every stage after the first needs "
            f"one; give {num_stages - 1} steps"
        )
    return starts
