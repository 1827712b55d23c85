"""GeoSpot on rows of a test, and its gold answers."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fovea_gym.environments.geospot.environment import GeoSpot
from fovea_gym.rows.access import RowAccess
from fovea_gym.settings.environments import GeoSpotEnvironment
from fovea_gym.types import Task
from gym_tests.grading import scored


def geospot(folder: Path, rows: list[dict[str, object]], **settings: object) -> GeoSpot:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    files = (str(folder / "rows.parquet"),)
    config = {"train_files": files, "test_files": files, "dev_share": 0, **settings}
    return GeoSpot(GeoSpotEnvironment.model_validate(config), RowAccess())


def check_gold(environment: GeoSpot, tasks: list[Task]) -> None:
    for task in tasks:
        text, messages = environment.target(task), tuple(environment.prompt(task))
        assert len(environment.graders) == 5
        for stage, grader in enumerate(environment.graders):
            score = scored([grader], task, text, messages)
            assert (score.reward, score.accuracy) == (1.0, 1.0), (task.id, stage, text)
            assert {value for name, value in score.parts.items() if name != "distance_km"} == {1.0}
            assert score.parts.get("distance_km", 0.0) == pytest.approx(0.0, abs=0.1)
