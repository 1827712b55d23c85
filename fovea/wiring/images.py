"""Builders of the readers of images and data files, without torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from fovea.config.sections import Data
from fovea_gym.rows.access import RowAccess, UrlLimits
from fovea_gym.rows.fetch import FailedHosts, FetchedFiles
from fovea_gym.rows.images import ImageOpener
from fovea_gym.rows.readers.remote import remote_image
from fovea_gym.tools.results import ResultLimits

SECTION = "data."
"""Prefix of these settings in a recipe, which errors of the gym print too."""
URL_CACHE_GIB = 8.0
"""Disk space for downloaded images."""
HOST_PAUSE_SECONDS = 60.0
"""Pause before a host that failed for three images in a row is asked again."""


def url_limits(settings: Data) -> UrlLimits:
    """Limits of reading from URLs."""
    return UrlLimits(
        max_image_mib=settings.max_image_mib,
        url_timeout_seconds=settings.url_timeout_seconds,
        allow_private_addresses=settings.allow_private_addresses,
        section=SECTION,
    )


def make_opener(settings: Data, folder: Path, note: Callable[[str], None] = lambda _: None) -> ImageOpener:
    """Make the opener of images, with a cache in the run folder; `note` gets a line for a host that is down."""
    read = FailedHosts(partial(remote_image, limits=url_limits(settings)), HOST_PAUSE_SECONDS, note)
    fetch = FetchedFiles(folder / "images", URL_CACHE_GIB, read)
    return ImageOpener(
        max_image_mib=settings.max_image_mib,
        max_image_megapixels=settings.max_image_megapixels,
        convert_images=settings.convert_images,
        fetch=fetch,
        section=SECTION,
    )


def make_access(settings: Data) -> RowAccess:
    """Make the access settings of data files."""
    return RowAccess(
        cache_dir=Path(settings.cache_dir),
        image_root=settings.image_root,
        url_limits=url_limits(settings),
        data_section=SECTION,
    )


def result_limits(settings: Data, opener: ImageOpener) -> ResultLimits:
    """Make the limits on images that tools return."""
    return ResultLimits(open_image=opener, image_root=settings.image_root, section=SECTION)
