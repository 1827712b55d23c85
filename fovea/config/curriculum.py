"""Settings of the curriculum, and of the environment that has stages (`fovea.config.run`)."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fovea.config.base import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from fovea.config.splits import SplitFiles


class GeoSpotWeights(Section):
    """Weights of the parts of the reward; those of the parts that a stage asks for are scaled to sum to 1."""

    country: NonNegativeFloat = 0.3
    """Weight of the country: its name or ISO code."""
    region: NonNegativeFloat = 0.2
    """Weight of the state or province."""
    city: NonNegativeFloat = 0.2
    """Weight of the city, town or village."""
    coordinates: NonNegativeFloat = 0.3
    """Weight of latitude and longitude, graded by exp(-distance / tolerance)."""

    @model_validator(mode="after")
    def _country_counts(self) -> GeoSpotWeights:
        if self.country == 0:
            raise ValueError("environment.weights.country=0, but the first stages ask for nothing else; set it above 0")
        return self


class GeoSpotEnvironment(SplitFiles):
    """Where was this picture taken? Country, region, city and coordinates, asked for in stages (see `curriculum`)."""

    name: Literal["geospot"] = "geospot"
    image_key: str | None = None
    """Column of the picture; default: image, or image_url where there is no such column."""
    country_key: str = "country"
    """Column of the country: a name or an ISO code."""
    region_key: str | None = None
    """Column of the state or province; default: region, if there is such a column."""
    city_key: str = "city"
    """Column of the city; an empty cell is not asked for."""
    lat_key: str = "lat"
    """Column of the latitude in degrees, south negative."""
    lon_key: str = "lon"
    """Column of the longitude in degrees, west negative."""
    level_key: str | None = None
    """Column of a level of difficulty, a text, by which curriculum.level_weights draws rows."""
    prompt: str = (
        "Where was this picture taken? Answer with five lines: City: ..., Region: ... (state or province), "
        "Country: ..., Latitude: ... and Longitude: ... in decimal degrees."
    )
    """Question, the same for every picture."""
    system_prompt: str | None = None
    """System prompt."""
    weights: GeoSpotWeights = Field(default_factory=GeoSpotWeights)
    tolerances_km: Annotated[tuple[PositiveFloat, ...], Field(min_length=5, max_length=5)] = (500, 200, 100, 50, 25)
    """Distance at which the score for coordinates falls to 1/e, in each of the five stages, from large to small."""

    @property
    def image_names(self) -> tuple[str, ...]:
        return ("image", "image_url") if self.image_key is None else (self.image_key,)

    @property
    def named_columns(self) -> list[tuple[str, str]]:
        keys = ("image_key", "country_key", "region_key", "city_key", "lat_key", "lon_key", "level_key")
        named = [(f"environment.{key}", getattr(self, key)) for key in keys]
        return [(setting, column) for setting, column in named if column is not None]

    @property
    def names_images(self) -> bool:
        return self.image_key is not None

    @model_validator(mode="after")
    def _tolerances_tighten(self) -> GeoSpotEnvironment:
        if any(later >= earlier for earlier, later in pairwise(self.tolerances_km)):
            raise ValueError(
                f"environment.tolerances_km={list(self.tolerances_km)}, but each stage must be stricter than the one "
                "before it; write falling numbers, such as [500, 200, 100, 50, 25]"
            )
        return self


class Curriculum(Section):
    """Curriculum: stages of the environment (geospot has five), and the difficulty of its rows in each stage."""

    enabled: bool = True
    """Go through the stages; false: the last stage from the first step on."""
    advance: Literal["step", "success"] = "step"
    """Criterion for the next stage: the number of steps, or the mean reward."""
    starts: tuple[PositiveInt, ...] | None = None
    """First steps of the second and later stages (advance=step); default: the environment's (geospot: 100, 300, 600,
    1000)."""
    success_rate: Fraction = 0.8
    """Mean reward that ends a stage (advance=success) ..."""
    success_window_steps: PositiveInt = 20
    """... over this many steps of that stage."""
    level_weights: tuple[dict[str, NonNegativeFloat], ...] = ()
    """Sampling weights of the difficulty levels, one table per stage (0: never; a level not named: 1)."""

    @property
    def tables_in_use(self) -> tuple[dict[str, float], ...]:
        """Tables of the stages that a run goes through.

        Without the curriculum that is the last one; one of ones, which weighs nothing, may then name levels that no row
        has, so that a recipe's curriculum can be turned off for other rows.
        """
        if self.enabled:
            return self.level_weights
        return tuple(table for table in self.level_weights[-1:] if any(weight != 1 for weight in table.values()))

    @model_validator(mode="after")
    def _starts_rise(self) -> Curriculum:
        if self.starts is not None and any(later <= earlier for earlier, later in pairwise(self.starts)):
            raise ValueError(f"curriculum.starts={list(self.starts)} must rise; sort it, each step once")
        return self
