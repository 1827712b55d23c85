"""The state of a run between two steps, and its JSON form in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from time import perf_counter
from typing import Any, TypedDict

from pydantic import TypeAdapter

from fovea.data.curriculum import CurriculumState
from fovea.evaluation.controls import SharedImages
from fovea.run.checkpoint import RetainedCheckpoints
from fovea.run.context import Run
from fovea.run.microbatches import MicrobatchTokens
from fovea.types import Evaluation


class Position(TypedDict):
    """Position of a run in its data and curriculum, between two rollouts; JSON-serialisable."""

    order: Any
    curriculum: CurriculumState
    bad_rows: int


def position_of(run: Run) -> Position:
    """The current position, before the next rollout."""
    stream = run.stream
    return {
        "order": stream.order.state(),
        "curriculum": stream.curriculum.state(),
        "bad_rows": len(run.sources.bad_rows),
    }


def restore_position(run: Run, position: Mapping[str, Any]) -> None:
    """Go back to a position, from which the run takes the same rows in the same stages as before."""
    stream = run.stream
    stream.order.restore(position["order"])
    stream.curriculum.restore(position["curriculum"])
    stream.order.weigh_levels(stream.curriculum.level_weights)
    run.sources.bad_rows.keep_first(position["bad_rows"])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Progress of a run, which every checkpoint stores."""

    kl_coef: float
    """KL coefficient of the next step, which `algorithm.kl.controller` adapts."""
    step: int = 0
    """Number of RL steps taken, which is also the version of the policy that samples next."""
    before: Evaluation | None = None
    after_warmup: Evaluation | None = None
    warmup_seconds: float = 0.0
    rl_seconds: float = 0.0
    retained: RetainedCheckpoints = field(default_factory=RetainedCheckpoints)
    microbatches: MicrobatchTokens | None = None
    """Size limit of micro-batches in the last step; None before the first step."""
    shared_images: SharedImages | None = None
    """Test images that are also in the training split; None if the run did not look for them."""
    started: float = field(default_factory=perf_counter)
    """`perf_counter` value at the start of the run in this process."""
    earlier_seconds: float = 0.0
    """Duration of the run in earlier processes, before a resume."""

    @property
    def total_seconds(self) -> float:
        return self.earlier_seconds + perf_counter() - self.started

    def to_json(self) -> dict[str, Any]:
        """JSON form, without the step, which a checkpoint stores separately."""
        saved: dict[str, Any] = _STATE.dump_python(
            replace(self, earlier_seconds=self.total_seconds), mode="json", exclude=_OF_THIS_PROCESS
        )
        return saved

    @staticmethod
    def from_json(step: int, saved: Mapping[str, Any], *, started: float) -> TrainState:
        """Read what `to_json` wrote, in a process that began at `started`."""
        names = {field.name for field in fields(TrainState)} - _OF_THIS_PROCESS
        return _STATE.validate_python({"step": step, "started": started, **{name: saved[name] for name in names}})


_OF_THIS_PROCESS = {"step", "started"}
_STATE = TypeAdapter(TrainState)
