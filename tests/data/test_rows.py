"""Rows that a run leaves out, images in buckets, and the order of rows, however it is cut or resumed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pandas as pd
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.data.bad_rows import BAD_ROWS_FILE, BadRows
from fovea.data.order import EpochOrder, Order
from fovea.wiring.environment import make_environment
from fovea.wiring.given import rows_as_files
from fovea.wiring.images import make_access, make_opener, result_limits
from fovea_gym.errors import BadRowError, ConfigError, DataError, MissingExtraError
from fovea_gym.rows.cells import image_refs
from fovea_gym.rows.rows import MADE, open_rows
from fovea_gym.rows.tasks import LazyTasks, RowPlace, kinds_of
from fovea_gym.tools.base import BadResultError
from fovea_gym.tools.results import checked_parts
from fovea_gym.types import ImageRef, Task
from fovea_gym.utils.installing import pip_install
from fovea_tools.commands.data import app as data_app
from gym_tests.images import png
from gym_tests.tables import table


def test_a_file_that_a_command_writes_is_told_with_it() -> None:
    with pytest.raises(DataError, match=r"data/easy_vqa/train\.parquet; `fovea data easy-vqa` writes it$"):
        open_rows(["data/easy_vqa/train.parquet"])
    commands = [each.name or each.callback.__name__ for each in data_app.registered_commands if each.callback]
    assert {name.replace("-", "_") for name in commands} == set(MADE)


def test_errors_about_rows_and_images_name_the_settings_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "a.jsonl").write_text('{"image": "../../etc/passwd"}')
    turned = Image.new("RGB", (40, 40))
    turned.getexif()[0x0112] = 6
    words = ["model.tiny={}", f"data.cache_dir={tmp_path}/file", f"data.image_root={tmp_path}"]
    limits = ["data.max_image_mib=0.0001", "data.max_image_megapixels=0.01", "data.convert_images=[]"]
    data = load_config([], [*words, *limits]).data
    opener, access = make_opener(data, tmp_path), make_access(data)
    rows = open_rows([str(tmp_path / "a.jsonl")], access=access)
    calls: dict[str, Callable[[], object]] = {
        "data.max_image_mib=0.0001": lambda: opener(ImageRef(source=b"x" * 200)),
        "data.max_image_megapixels=0.01": lambda: opener(ImageRef(source=np.zeros((200, 200, 3), np.uint8))),
        "add rotated to data.convert_images": lambda: opener(ImageRef(source=turned)),
        "set data.allow_private_addresses=true": lambda: opener(ImageRef(source="http://127.0.0.1:9/a.png")),
        "set data.image_root": lambda: rows.image_refs(0, rows[0]["image"]),
        "set data.cache_dir": lambda: open_rows([f"file://{tmp_path}/a.jsonl"], access=access),
        f"inside data.image_root={tmp_path}": lambda: checked_parts(
            [ImageRef(source="/etc/passwd")], "look", result_limits(data, opener)
        ),
    }
    for setting, call in calls.items():
        with pytest.raises((DataError, BadResultError)) as error:
            call()
        assert setting in str(error.value)
        assert "on_bad_row" not in str(error.value), "the place that ends the run at a bad row says so"


def place(n: int) -> RowPlace:
    return RowPlace(f"/data/a.jsonl row {n}", f"a.jsonl row {n}")


def test_each_row_once_and_counted_by_reason(tmp_path: Path) -> None:
    rows = BadRows(tmp_path)
    rows.add(place(1), BadRowError("a.jsonl row 1: no; fix", "image_missing"))
    rows.add(place(1), BadRowError("a.jsonl row 1: again", "image_empty"))
    rows.add(place(2), DataError("a.jsonl row 2: what an environment of a user says"))
    rows.add(place(3), BadRowError("a.jsonl row 3: no", "image_missing"))
    assert [place(n).key in rows for n in (2, 4)] == [True, False]
    counts = {"data/rows_skipped/image_missing": 2, "data/rows_skipped/other": 1}
    assert rows.metrics() == {"data/rows_skipped": 3, **counts}
    lines = [json.loads(line) for line in (tmp_path / BAD_ROWS_FILE).read_text().splitlines()]
    reasons = enumerate(("image_missing", "other", "image_missing"), start=1)
    assert [(line["row"], line["reason"]) for line in lines] == [(f"a.jsonl row {n}", reason) for n, reason in reasons]
    assert lines[0]["error"] == "a.jsonl row 1: no; fix"
    # nothing dropped is a zero
    assert BadRows().metrics() == {"data/rows_skipped": 0}


def test_a_resumed_run_knows_what_it_knew_at_its_checkpoint(tmp_path: Path) -> None:
    first = BadRows(tmp_path)
    for n in range(3):
        first.add(place(n), BadRowError(f"row {n}\u2028: no", "image_missing"))
    resumed = BadRows(tmp_path, resume_at=2)
    assert (len(resumed), [place(n).key in resumed for n in range(3)]) == (2, [True, True, False])
    resumed.add(place(2), BadRowError("row 2: no", "url_timeout"))
    assert len((tmp_path / BAD_ROWS_FILE).read_text().splitlines()) == 3
    assert resumed.metrics()["data/rows_skipped/url_timeout"] == 1
    assert len(BadRows(tmp_path)) == 0, "a new run begins a new list"
    assert (tmp_path / BAD_ROWS_FILE).read_text() == ""


@pytest.mark.parametrize(
    "tail",
    [b"\0" * 64, b'{"key": "/data/a.js', b"\0" * 64 + b"\n", b"[1]\n", b"\xff\xfe\n"],
    ids=["nuls", "half a line", "a line of nuls", "a list", "no text"],
)
def test_a_resumed_run_drops_damaged_lines_and_lists_their_rows_again(tail: bytes, tmp_path: Path) -> None:
    """As a failure of the machine leaves them; the next row would be glued to half a line."""
    first, file = BadRows(tmp_path), tmp_path / BAD_ROWS_FILE
    for n in range(3):
        first.add(place(n), BadRowError(f"row {n}: no", "image_missing"))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + tail)
    resumed = BadRows(tmp_path, resume_at=3)
    assert ([place(n).key in resumed for n in range(3)], resumed.num_lost) == ([True, False, False], 2)
    for n in (1, 2):
        resumed.add(place(n), BadRowError(f"row {n}: no", "image_missing"))
    assert file.read_bytes().splitlines(keepends=True) == lines
    assert BadRows(tmp_path, resume_at=3).num_lost == 0


@table("reader", [{"evaluate": {"every_steps": 5}}, {"warmup": {}}])
def test_readers_of_dev_need_dev_rows(reader: dict[str, object]) -> None:
    files = {"name": "vqa", "train_files": ["a"], "test_files": ["b"], "dev_share": 0}
    with pytest.raises(ValidationError, match=r"\benvironment\.dev_share=0\b"):
        Config.model_validate({"model": {"tiny": {}}, "environment": files, **reader})
    Config.model_validate({"model": {"tiny": {}}, "environment": {**files, "dev_files": ["c"]}, **reader})


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
    settings = {"model": {"tiny": {}}, "environment": environment, "data": data, "run_dir": str(folder)}
    return Config.model_validate(settings)


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
    problem = rf"a.csv line 2, .*{url} needs a package .*{re.escape(pip_install(extra))}"
    with pytest.raises(MissingExtraError, match=problem):
        make_opener(config_of(tmp_path, []).data, tmp_path)(ref)


FOLDERS = (None, "/data", "s3://bucket/data")
OTHERS = ("file:///etc/passwd", "local:///etc/passwd", "sftp://intranet/a.png")
CHAIN = "simplecache::file:///etc/passwd"


@table(
    ("path", "folder", "reason"),
    [
        *((path, folder, "image_outside_folder") for path in OTHERS for folder in FOLDERS),
        *(("s3://bucket/a.png::file:///etc/passwd", folder, "url_invalid") for folder in FOLDERS),
        (CHAIN, "s3://bucket/data", "url_invalid"),
    ],
)
def test_no_other_protocol_is_read(path: str, folder: str | None, reason: str) -> None:
    """fsspec chains protocols by `::`; to a local folder that is a name like any other."""
    with pytest.raises(BadRowError) as error:
        image_refs(path, where="w", folder=folder)
    assert error.value.reason == reason
    for here in (None, "/data"):
        (ref,) = image_refs(CHAIN, where="w", folder=here)
        assert str(ref.source).startswith("/")


KINDS = ["a"] * 7 + ["b"] * 3 + ["c"] * 5


def order(seed: int = 0, **weights: float) -> Order:
    return Order(KINDS, weights=weights, seed=seed)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 60), max_size=12), st.integers(0, 12), st.integers(0, 2**40))
def test_cuts_and_resumes_do_not_matter(cuts: list[int], resume_at: int, seed: int) -> None:
    straight = order(seed, b=2.5).take(sum(cuts))
    taken, current = [], order(seed, b=2.5)
    for step, n in enumerate(cuts):
        if step == resume_at:
            state = json.loads(json.dumps(current.state()))
            current = order(seed, b=2.5)
            current.restore(state)
        taken += current.take(n)
    assert taken == straight


def test_resume_across_a_block_and_many_shuffles() -> None:
    straight = order().take(20_000)
    first, second = order(), order()
    assert first.take(12_345) == straight[:12_345]
    second.restore(first.state())
    assert second.take(20_000 - 12_345) == straight[12_345:]


def test_rows_of_a_kind_come_once_before_any_comes_again() -> None:
    taken = order().take(3000)
    for kind in "abc":
        rows, num_rows = [row for row in taken if KINDS[row] == kind], KINDS.count(kind)
        passes = [rows[at : at + num_rows] for at in range(0, len(rows) - num_rows, num_rows)]
        assert all(sorted(one) == sorted(passes[0]) for one in passes)
        assert len({tuple(one) for one in passes}) > 3


def test_kinds_come_by_rows_times_weight() -> None:
    taken = order(b=4.0, c=0.2).take(50_000)
    shares = Counter(KINDS[row] for row in taken)
    for kind, weight in (("a", 7), ("b", 12), ("c", 1)):
        # four standard deviations of a binomial share are below 0.01
        assert shares[kind] / 50_000 == pytest.approx(weight / 20, abs=0.01)


def test_seeds_differ_and_repeat() -> None:
    assert order(1).take(50) == order(1).take(50) != order(2).take(50)
    assert order().take(0) == []
    first, second = (EpochOrder(50, seed=seed, shuffle=True).take(100) for seed in (0, 1))
    assert first[:50] != first[50:]
    assert first != second


def test_unknown_kind_in_weights() -> None:
    with pytest.raises(
        ConfigError, match=r"^data.kind_weights names 'colour', but no row has that kind; use one of a, b"
    ):
        order(colour=2.0)
    with pytest.raises(ConfigError, match=r"^warmup\.kind_weights: a\b"):
        Order(KINDS, weights={"a": 0.0}, seed=0, setting="warmup.kind_weights")
    with pytest.raises(DataError, match="there are no rows; give the data set"):
        Order([], weights={}, seed=0)


def task(index: int) -> Task:
    return Task(id=f"train/{index}", question="?", answer="!", kind="even" if index % 2 == 0 else "odd")


def test_lazy_tasks_know_their_kinds_without_being_made() -> None:
    made = []

    def make(index: int) -> Task:
        made.append(index)
        return task(index)

    tasks = LazyTasks(make, range(0, 10, 3), kind_of=lambda index: "even" if index % 2 == 0 else "odd")
    assert kinds_of(tasks) == ["even", "odd", "even", "odd"]
    assert kinds_of(tasks[1:3]) == ["odd", "even"]
    assert made == []
    assert tasks[-1].id == "train/9"
    assert [one.id for one in tasks[1:3]] == ["train/3", "train/6"]
    assert made == [9, 3, 6]
    assert kinds_of([task(0), task(1)]) == ["even", "odd"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 12), st.booleans())
def test_every_row_comes_once_an_epoch(cuts: list[int], resume_at: int, shuffle: bool) -> None:
    def order() -> EpochOrder:
        return EpochOrder(7, seed=3, shuffle=shuffle, max_epochs=3)

    taken, current = list[int](), order()
    for step, n in enumerate(cuts):
        if step == resume_at:
            state = json.loads(json.dumps(current.state()))
            current = order()
            current.restore(state)
        rest = current.rest()
        assert rest is not None
        ahead = list(rest)
        rows = current.take(n)
        assert rows == ahead[:n]
        taken += rows
    assert taken == order().take(100)[: sum(cuts)]
    whole = order().take(100)
    assert [sorted(whole[start : start + 7]) for start in (0, 7, 14)] == [list(range(7))] * 3
    assert len(whole) == 21
    assert (whole == [*range(7)] * 3) is not shuffle


def test_an_order_is_resumed_by_its_own_kind_and_rows() -> None:
    with pytest.raises(DataError, match=r"'a': 6.*'a': 7"):
        order().restore(Order(KINDS[1:], weights={}, seed=0).state())
    epochs, kinds = EpochOrder(7, seed=0, shuffle=True), Order(["a"] * 7, weights={}, seed=0)
    with pytest.raises(DataError, match=r"without max_epochs and with data\.shuffle=true\b"):
        epochs.restore(kinds.state())  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"began with max_epochs, or data.shuffle=false"):
        kinds.restore(epochs.state())  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"\b7 rows\b.*\b8\b"):
        EpochOrder(8, seed=0, shuffle=True).restore(epochs.state())
    # an order that ends before the position
    drawn = EpochOrder(7, seed=0, shuffle=True, max_epochs=3)
    drawn.take(14)
    EpochOrder(7, seed=0, shuffle=True, max_epochs=2).restore(drawn.state())
    with pytest.raises(ConfigError, match=r"\bmax_epochs=1\b.*\b14\b.*\b7\b"):
        EpochOrder(7, seed=0, shuffle=True, max_epochs=1).restore(drawn.state())


@table("once", ["max_epochs=2", "data.shuffle=false"])
@table("weights", ["data.kind_weights={a: 2}", "curriculum.level_weights=[{'1': 2}]"])
def test_rows_that_come_once_have_no_weights(once: str, weights: str) -> None:
    with pytest.raises(ConfigError, match=rf"\b{once}\b.*\b{weights.partition('=')[0]}\b"):
        load_config([], ["model.tiny={}", once, weights])
