"""Controls for a learning curve: a random reward, and training rows whose pictures are swapped.

    fovea train geospot_europe reward=benchmarks/controls.py:random_geospot
    python -m benchmarks.controls data/readable/train.parquet swapped.parquet

The random rewards are 1 for three in ten answers. The reward that the environment would have given is logged as
`reward/true`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow.parquet as pq

from fovea_gym.environments.geo3k import Geo3kGrader
from fovea_gym.environments.geospot.environment import GeoSpotGrader
from fovea_gym.environments.geospot.reward import GeoStage
from fovea_gym.settings.environments import Geo3kEnvironment, GeoSpotEnvironment
from fovea_gym.types import Score, Task, Turn

SHARE = 0.3
_FILES = {"train_files": ["train.parquet"], "test_files": ["test.parquet"]}
_GEO3K = Geo3kGrader(Geo3kEnvironment.model_validate({"name": "geo3k", "format_weight": 0, **_FILES}))
_GEOSPOT_SETTINGS = GeoSpotEnvironment.model_validate({"name": "geospot", **_FILES})
_ALL_PARTS = GeoStage(name="all", asks=("country", "region", "city", "coordinates"), tolerance_km=25)
_GEOSPOT = GeoSpotGrader(_GEOSPOT_SETTINGS, _ALL_PARTS, dict(_GEOSPOT_SETTINGS.weights.items()))


async def random_geo3k(task: Task, text: str, images: Sequence[object]) -> Mapping[str, float]:
    return _random(await _GEO3K.score(task, (Turn(messages=(), text=text),)))


async def random_geospot(task: Task, text: str, images: Sequence[object]) -> Mapping[str, float]:
    return _random(await _GEOSPOT.score(task, (Turn(messages=(), text=text),)))


def _random(score: Score) -> Mapping[str, float]:
    reward = float(random.random() < SHARE)
    return {**score.parts, "true": score.reward, "accuracy": score.accuracy, "reward": reward}


def main() -> None:
    source, target = sys.argv[1:]
    table = pq.read_table(source)
    column = "images" if "images" in table.column_names else "image"
    order = np.random.default_rng(0).permutation(len(table))
    swapped = table.set_column(table.schema.get_field_index(column), column, table[column].take(order))
    pq.write_table(swapped, target)


if __name__ == "__main__":
    main()
