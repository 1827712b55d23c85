"""Images in buckets, named by rows of local tables and DataFrames: read by fsspec, within the limits of URLs."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pandas as pd
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from fovea.config.run import Config
from fovea.wiring.environment import make_environment
from fovea.wiring.given import rows_as_files
from fovea.wiring.images import make_opener
from fovea_gym.errors import BadRowError, MissingExtraError
from fovea_gym.rows.cells import image_refs
from fovea_gym.utils.installing import pip_install
from gym_tests.images import png
from gym_tests.tables import table

COLOURS = {
    "s3://bucket/image1.png": (255, 0, 0),
    "s3://other/image2.png": (0, 0, 255),
    "gs://third/a b.png": (0, 255, 0),
}


class S3(MemoryFileSystem):
    """A store in memory, under the name of a bucket's protocol."""

    protocol = ("s3", "s3a")
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]


class Gs(MemoryFileSystem):
    protocol = ("gs", "gcs")
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]


class Slow(AsyncFileSystem):
    """A store whose files never come to an end."""

    protocol = "s3"
    cachable = False

    async def _info(self, path: str, **_: object) -> dict[str, object]:
        return {"name": path, "size": 10, "type": "file"}

    async def _cat_file(self, _path: str, **_: object) -> bytes:
        await asyncio.sleep(60)
        return b""


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> None:
    for store in (S3, Gs):
        monkeypatch.setitem(_registry, store.protocol[0], store)
        store.store.clear()
    for url, colour in COLOURS.items():
        filesystem, path = fsspec.core.url_to_fs(url)
        filesystem.pipe_file(path, png(colour))


def config_of(folder: Path, files: list[str], **data: object) -> Config:
    environment = {"name": "geospot", "train_files": files, "test_files": files}
    return Config.model_validate(
        {"model": {"tiny": {}}, "environment": environment, "data": data, "run_dir": str(folder)}
    )


PLACES = pd.DataFrame(
    [{"image_url": url, "country": "France", "city": "Paris", "lat": 48.86, "lon": 2.35} for url in COLOURS]
)


@pytest.mark.usefixtures("stores")
@pytest.mark.parametrize("form", ["frame", "file"])
def test_pictures_of_several_buckets_in_one_table(form: str, tmp_path: Path) -> None:
    PLACES.to_csv(tmp_path / "places.csv", index=False)
    config = config_of(tmp_path, [] if form == "frame" else [str(tmp_path / "places.csv")], cache_dir=str(tmp_path))
    with rows_as_files(config, {"train": PLACES, "test": PLACES} if form == "frame" else None) as rows:
        rows.move_into(tmp_path)
    tasks = make_environment(rows.config).environment.tasks("test")
    open_image = make_opener(config.data, tmp_path)
    assert [open_image(ref).getpixel((0, 0)) for task in tasks for ref in task.images] == list(COLOURS.values())
    # they are kept in the run folder: a store that is gone is not asked again
    S3.store.clear()
    Gs.store.clear()
    assert [open_image(ref).getpixel((0, 0)) for task in tasks for ref in task.images] == list(COLOURS.values())


@pytest.mark.usefixtures("stores")
@pytest.mark.parametrize(
    ("url", "limits", "reason"),
    [
        ("s3://bucket/image1.png", {"max_image_mib": 1e-5}, "image_too_large"),
        ("s3://bucket/image1.png", {"max_image_megapixels": 1e-5}, "image_too_many_pixels"),
        ("s3://bucket/none.png", {}, "image_missing"),
    ],
)
def test_the_limits_of_images_hold_for_buckets(url: str, limits: dict[str, float], reason: str, tmp_path: Path) -> None:
    (ref,) = image_refs(url, where="a.csv line 2", folder=tmp_path)
    with pytest.raises(BadRowError, match=rf"a.csv line 2, image 1 \({url}\): ") as error:
        make_opener(config_of(tmp_path, [], **limits).data, tmp_path)(ref)
    assert error.value.reason == reason


def test_a_store_that_hangs_is_given_up_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_registry, "s3", Slow)
    (ref,) = image_refs("s3://bucket/a.png", where="w", folder=tmp_path)
    with pytest.raises(BadRowError, match=r"took more than data.url_timeout_seconds=0.2") as error:
        make_opener(config_of(tmp_path, [], url_timeout_seconds=0.2).data, tmp_path)(ref)
    assert error.value.reason == "url_timeout"


@pytest.mark.parametrize(("url", "extra"), [("s3://b/a.png", "s3"), ("gs://b/a.png", "gs")])
def test_a_store_whose_package_is_missing_names_it(url: str, extra: str, tmp_path: Path) -> None:
    if importlib.util.find_spec({"s3": "s3fs", "gs": "gcsfs"}[extra]):
        pytest.skip("the package is installed")
    (ref,) = image_refs(url, where="a.csv line 2", folder=tmp_path)
    with pytest.raises(
        MissingExtraError, match=rf"a.csv line 2, .*{url} needs a package .*{re.escape(pip_install(extra))}"
    ):
        make_opener(config_of(tmp_path, []).data, tmp_path)(ref)


@table("folder", [None, "/data", "s3://bucket/data"])
@table(
    ("path", "reason"),
    [
        ("file:///etc/passwd", "image_outside_folder"),
        ("local:///etc/passwd", "image_outside_folder"),
        ("sftp://intranet/a.png", "image_outside_folder"),
        ("simplecache::file:///etc/passwd", None),
        ("s3://bucket/a.png::file:///etc/passwd", "url_invalid"),
    ],
)
def test_no_other_protocol_is_read(folder: str | None, path: str, reason: str | None) -> None:
    """fsspec chains protocols by `::`; to a local folder that is a name like any other."""
    if reason is None and folder != "s3://bucket/data":
        (ref,) = image_refs(path, where="w", folder=folder)
        assert str(ref.source).startswith("/")
        return
    with pytest.raises(BadRowError) as error:
        image_refs(path, where="w", folder=folder)
    assert error.value.reason == (reason or "url_invalid")
