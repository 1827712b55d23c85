"""Pictures with the places where they were taken, from your own table or one in OSV-5M's layout.

Columns: an image, `country` (a name or an ISO code), `city`, `lat`, `lon`, and optionally `region`. Empty cells are not
asked for; only the country is required, because every stage asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import get_args

from fovea_gym.environments.base import Environment, Split
from fovea_gym.environments.dataset_prompts import bad_row
from fovea_gym.environments.file_splits import FileSplits
from fovea_gym.environments.geospot.coordinates import degrees_text
from fovea_gym.environments.geospot.countries import country_name
from fovea_gym.environments.geospot.parsing import parse_answer
from fovea_gym.environments.geospot.reward import (
    STAGES,
    STARTS,
    GeoStage,
    KnownPlace,
    distance_parts,
    grade_answer,
    place_of,
)
from fovea_gym.environments.stages import Stage
from fovea_gym.errors import DataError
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.rows import Rows
from fovea_gym.settings.environments import GeoColumn, GeoSpotEnvironment
from fovea_gym.types import Message, Score, Task, Turn


class GeoSpot(Environment):
    """The environment `geospot`, whose settings are `GeoSpotEnvironment`."""

    def __init__(self, config: GeoSpotEnvironment, access: RowAccess) -> None:
        self._config = config
        self._section = access.section
        self._splits = FileSplits(config, access)
        stages = [
            GeoStage(name=stage.name, asks=stage.asks, tolerance_km=tolerance_km)
            for stage, tolerance_km in zip(STAGES, config.tolerances_km, strict=True)
        ]
        weights: Mapping[str, float] = dict(config.weights.items())
        self.graders = tuple(GeoSpotGrader(config, stage, weights) for stage in stages)
        self.stages = [Stage(name=stage.name, facts=_facts(stage, weights)) for stage in stages]
        self.default_starts = STARTS

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._splits.tasks(split, partial(self._task, split), level_key=self._config.level_key)

    def prompt(self, task: Task) -> Sequence[Message]:
        question = Message(role="user", parts=(*task.images, task.question))
        if self._config.system_prompt is None:
            return (question,)
        return (Message(role="system", parts=(self._config.system_prompt,)), question)

    def target(self, task: Task) -> str:
        place = true_place(task.row, task.id, self._config)
        lines = {"City": place.city, "Region": place.region, "Country": self._country(task.row, place)}
        if place.at is not None:
            lines |= {"Latitude": degrees_text(place.at.lat), "Longitude": degrees_text(place.at.lon)}
        return "\n".join(f"{label}: {value}" for label, value in lines.items() if value is not None)

    def _task(self, split: Split, rows: Rows, index: int, kind: str) -> Task:
        row, where = rows[index], rows.where(index)
        place = true_place(row, where, self._config)
        if place.country is None:
            raise bad_row(where, "the country is empty, so the first stages have nothing to ask for", "place")
        images = rows.image_refs(index, self._image(row, where))
        if not images:
            raise bad_row(where, "there is no picture, so there is nothing to look at", "image_absent")
        known = (place.city, place.region, self._country(row, place), *(f"{x:.4f}" for x in place.at or ()))
        return Task(
            id=f"{split}/{index}",
            question=self._config.prompt,
            answer=", ".join(each for each in known if each is not None),
            images=images,
            kind=kind,
            row=row,
        )

    def _image(self, row: Mapping[str, object], where: str) -> object:
        key = next((key for key in self._config.image_names if key in row), None)
        if key is None:
            raise DataError(
                f"{where}: no column is called image or image_url (the columns are {', '.join(row)}); set "
                f"{self._section}image_key to one of them"
            )
        return row[key]

    def _country(self, row: Mapping[str, object], place: KnownPlace) -> str | None:
        """The country as the row writes it, with a code replaced by the name."""
        cell = row.get(self._config.columns["country"])
        is_code = isinstance(cell, str) and len(cell.strip()) <= 3
        return country_name(place.country) if is_code and place.country else str(cell) if cell is not None else None


class GeoSpotGrader:
    """The grader of one stage of `geospot`."""

    def __init__(self, config: GeoSpotEnvironment, stage: GeoStage, weights: Mapping[str, float]) -> None:
        self._config = config
        self._stage = stage
        self._weights = weights

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        place = true_place(task.row, task.id, self._config)
        answer = parse_answer(turns[-1].text)
        grade = grade_answer(answer, place, self._stage, self._weights)
        parts = dict(grade.parts) | distance_parts(answer, place, self._config.tolerances_km)
        # accuracy is the country's in every stage, so that one curve compares all stages
        return Score(reward=grade.score, accuracy=float(grade.parts["country"] == 1), parts=parts)


def true_place(row: Mapping[str, object], where: str, config: GeoSpotEnvironment) -> KnownPlace:
    """The place in a row, from the columns that the settings name; BadRowError if a cell is invalid."""
    return place_of(row, [config.columns.get(name, name) for name in get_args(GeoColumn)], where)


def _facts(stage: GeoStage, weights: Mapping[str, float]) -> Mapping[str, float]:
    """The figures of a stage for a log: its tolerance, and its weights scaled to sum to 1."""
    total = sum(weights[part] for part in stage.asks)
    return {"tolerance_km": stage.tolerance_km, **{f"weight_{part}": weights[part] / total for part in stage.asks}}
