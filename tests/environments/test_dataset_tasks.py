"""Rows of the user's own: the column of images in settings, and memory that stays bounded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fovea.config.loading import load_config
from fovea.wiring.environment import make_environment
from fovea_gym.errors import ConfigError, DataError
from fovea_gym.making import make
from gym_tests.tables import table

SHARED = Path(__file__).parents[3] / "shared" / "data" / "geo3k"


def test_image_key_is_short_for_one_of_image_keys() -> None:
    given = ["environment.name=geo3k", "environment.train_files=[a]", "environment.test_files=[a]", "model.tiny={}"]
    config = load_config([], [*given, "environment.image_key=photo"])
    assert config.environment.image_key == "photo"  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"\benvironment\.image_keys\b"):
        load_config([], [*given, "environment.image_key=photo", "environment.image_keys=[photo]"])


@table(
    ("column", "message"),
    [
        ({"prompt_key": "text"}, "{}prompt_key: rows.jsonl has no column 'text'; its .*; set {}prompt_key"),
        ({}, "{}train_files: no column is called .*; set {}prompt_key"),
        ({"train_files": ("no.jsonl",)}, "{}train_files: no such file no.jsonl"),
    ],
)
def test_an_error_of_rows_has_the_names_of_the_recipe_in_a_run_and_its_own_elsewhere(
    column: dict[str, Any], message: str, in_tmp_path: None
) -> None:
    Path("rows.jsonl").write_text('{"a": 1, "b": 2}\n')
    settings: dict[str, Any] = {"train_files": ("rows.jsonl",), "test_files": ("rows.jsonl",), **column}
    config = load_config([], ["model.tiny={}", f"environment={json.dumps({'name': 'geo3k', **settings})}"])
    for tasks, section in (
        (make_environment(config).environment.tasks, r"environment\."),
        (make("geo3k", **settings).tasks, ""),
    ):
        with pytest.raises(DataError, match="^" + message.format(section, section)):
            tasks("train")


STREAMED = """
import gc, sys
from pathlib import Path
from fovea_gym.settings.environments import Geo3kEnvironment
from fovea_gym.rows.images import ImageOpener
from fovea.data.order import Order
from fovea_gym.rows.access import GroupCache
from fovea_gym.rows.rows import RowAccess
from fovea_gym.rows.tasks import kinds_of
from fovea_gym.environments.dataset_tasks import FileTasks

def anonymous_mib():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) / 1024

def read(tasks, indices):
    num_bytes = 0
    for place, index in enumerate(indices):
        (ref,) = tasks[index].images
        num_bytes += len(ref.source)
        if place % 50 == 0:
            ImageOpener(max_image_mib=32, max_image_megapixels=64)(ref)
    return num_bytes

path, cache = sys.argv[1], GroupCache(16 << 20)
settings = Geo3kEnvironment(train_files=(path,), test_files=(path,), dev_share=0)
tasks = FileTasks(settings, RowAccess(cache=cache)).tasks("train")
shuffled = Order(kinds_of(tasks), weights={}, seed=0).take(200)
grown = []
for _ in range(4):
    before = anonymous_mib()
    num_bytes = read(tasks, [*range(2101), *shuffled])
    gc.collect()
    grown.append(anonymous_mib() - before)
print(num_bytes, cache.num_bytes, *grown)
"""
"""In a separate process: another's free lists would be measured as well. Mapped files are not counted, which the
system takes back when it needs to; every 50th image is decoded."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_all_of_geometry3k_streams_in_bounded_memory() -> None:
    """All 42 MB in order, then some in the seeded one, through 16 MiB of memory; three more times add nothing."""
    if not (SHARED / "train.parquet").exists():
        pytest.skip(f"the shared Geometry3K files are not here ({SHARED})")
    command = [sys.executable, "-c", STREAMED, str(SHARED / "train.parquet")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, timeout=120)
    num_bytes, cached, _, *later = map(float, done.stdout.split())
    assert num_bytes > 40e6
    assert cached <= 16 << 20
    assert sum(later) < 24
