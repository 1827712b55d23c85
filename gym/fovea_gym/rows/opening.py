"""The default opener of images, for use without a run: local files, and URLs with the default limits."""

from __future__ import annotations

from fovea_gym.rows.images import ImageOpener
from fovea_gym.types import Conversion

MAX_MIB, MAX_MEGAPIXELS = 32.0, 64.0
"""The default limits of an image."""
CONVERTED: tuple[Conversion, ...] = ("rotated",)
"""The conversions that are allowed by default."""


def default_opener() -> ImageOpener:
    """An opener with the default limits of a run; private addresses are refused."""
    return ImageOpener(
        max_image_mib=MAX_MIB, max_image_megapixels=MAX_MEGAPIXELS, convert_images=CONVERTED, fetch=_fetch
    )


def _fetch(url: str, where: str) -> bytes:
    # imported here, since readers of object stores take as long to import as everything else
    from fovea_gym.rows.access import UrlLimits
    from fovea_gym.rows.readers.remote import remote_image

    return remote_image(url, where, UrlLimits(max_image_mib=MAX_MIB))
