"""The position of a run in its rows, which every checkpoint holds: data order, curriculum, list of bad rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from fovea.environments.curriculum import CurriculumState
from fovea.run.context import Run


class Position(TypedDict):
    """The position between two rollouts; JSON-serialisable."""

    order: Any
    curriculum: CurriculumState
    bad_rows: int
    """Number of bad rows found so far."""


def position_of(run: Run) -> Position:
    """The present position, before the next rollout."""
    stream = run.stream
    return {
        "order": stream.order.state(),
        "curriculum": stream.curriculum.state(),
        "bad_rows": len(run.sources.bad_rows),
    }


def go_to(run: Run, position: Mapping[str, Any]) -> None:
    """Go to a position, from which the same rows are drawn in the same stages as before."""
    stream = run.stream
    stream.order.restore(position["order"])
    stream.curriculum.restore(position["curriculum"])
    stream.order.weigh_levels(stream.curriculum.level_weights)
    run.sources.bad_rows.keep_first(position["bad_rows"])
