"""`fovea data geo3k`: from a folder as the hub lays it out, from the real rows, and without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from fovea.cli.main import app
from fovea.config.loading import load_config
from fovea.wiring.environment import make_environment
from fovea_gym.environments.base import Split
from gym_tests.environments.files import row, square
from gym_tests.grading import check_gold

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared" / "data" / "geo3k"
ROWS = [row("Find x.", answer) for answer in (r"5 \sqrt { 3 }", "12", r"\frac { 1 } { 2 }")]


def hub_like(folder: Path) -> Path:
    (folder / "data").mkdir(parents=True)
    for place, split in enumerate(("train", "validation", "test")):
        pq.write_table(pa.Table.from_pylist(ROWS[place:]), folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


def written(source: Path, out: Path, *options: str, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["data", "geo3k", "--from", str(source), "--out", str(out), *options])
    assert result.exit_code == exit_code, result.output
    return result


def sizes_of_gold(train: Path, held_out: Path) -> list[int]:
    files = [f"environment.train_files=[{train}]", f"environment.test_files=[{held_out}]", "environment.dev_files=null"]
    made = make_environment(load_config([ROOT / "recipes" / "geo3k.yaml"], files))
    environment = made.environment
    splits: tuple[Split, ...] = ("train", "test")
    for split in splits:
        check_gold(environment, made.grading.graders, split)
    return [len(environment.tasks(split)) for split in splits]


def test_a_copy_of_the_hub_is_written_as_it_is(tmp_path: Path) -> None:
    result = written(hub_like(tmp_path / "copy"), tmp_path / "out")
    names = [f"{split}.parquet" for split in ("train", "validation", "test")]
    assert result.stdout.split() == [str(tmp_path / "out" / name) for name in names]
    for place, name in enumerate(names):
        assert pq.read_table(tmp_path / "out" / name).to_pylist() == ROWS[place:]
    assert f"'environment.dev_files=[{tmp_path / 'out' / 'validation.parquet'}]'" in result.stderr
    # the rows share one image, so that none of the three is held out
    assert sizes_of_gold(tmp_path / "out" / "train.parquet", tmp_path / "out" / "test.parquet") == [3, 1]


def test_images_beside_the_table_go_into_the_files(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "copy" / split).mkdir(parents=True)
        Image.new("RGB", (32, 32), (250, 10, 10)).save(tmp_path / "copy" / split / "a.png")
        lines = '{"file_names": ["a.png"], "problem": "<image>Find x.", "answer": 12}\n'
        (tmp_path / "copy" / split / "metadata.jsonl").write_text(lines, encoding="utf-8")
    written(tmp_path / "copy", tmp_path / "out", "--split", "train", "--split", "test")
    assert pq.read_table(tmp_path / "out" / "test.parquet").to_pylist() == [row("Find x.", "12")]


def test_a_data_set_as_the_hub_package_keeps_it(tmp_path: Path) -> None:
    """The way of a hub id, but for the download."""
    text = datasets.Value("string")
    features = datasets.Features({"images": datasets.Sequence(datasets.Image()), "problem": text, "answer": text})
    splits = {split: datasets.Dataset.from_list(ROWS, features=features) for split in ("train", "validation", "test")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    result = written(tmp_path / "saved", tmp_path / "out")
    assert pq.read_table(tmp_path / "out" / "validation.parquet").to_pylist() == ROWS
    result = written(tmp_path / "saved", tmp_path / "out", "--split", "dev", exit_code=2)
    assert "no split 'dev'; its splits are train, validation, test" in result.stderr


def test_a_split_that_is_not_there_is_named(tmp_path: Path) -> None:
    copy = hub_like(tmp_path / "copy")
    (copy / "data" / "test-00000-of-00001.parquet").unlink()
    pq.write_table(pa.Table.from_pylist(ROWS), copy / "fixture_test.parquet")
    result = written(copy, tmp_path / "out", exit_code=2)
    assert result.stdout == ""
    assert "or name the splits that it has: --split train --split validation\n" in result.stderr
    assert not (tmp_path / "out").exists()
    result = written(copy, tmp_path / "out", "--split", "train", "--split", "validation")
    settings = f"'environment.test_files=[{tmp_path / 'out' / 'validation.parquet'}]' environment.dev_files=null"
    assert settings in result.stderr, "test rows must not steer"


def test_rows_of_another_layout_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"prompt": "?", "images": [square("red")]}]), tmp_path / "train.parquet")
    result = written(tmp_path, tmp_path / "out", "--split", "train", exit_code=2)
    assert "has no column problem, answer; its columns are prompt, images; to train on files of" in result.stderr
    # a row without an answer stays one
    rows = [*ROWS, {**ROWS[0], "answer": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    written(tmp_path, tmp_path / "out", "--split", "train")
    assert pq.read_table(tmp_path / "out" / "train.parquet").to_pylist() == rows


@pytest.mark.parametrize(
    "network",
    [{"HF_HUB_OFFLINE": "1"}, pytest.param({"HF_ENDPOINT": "http://127.0.0.1:1"}, marks=pytest.mark.slow)],
    ids=["offline", "refused"],
)
def test_without_a_network_the_error_names_the_ways_out(network: dict[str, str], tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables = {**clean, **network, "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "fovea", "data", "geo3k", "--out", str(tmp_path / "out")]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: --from: the data set hiyouga/geometry3k cannot be loaded (ConnectionError: ")
    assert "set HF_ENDPOINT to a mirror, or copy its files by hand and name their folder" in last
    assert not (tmp_path / "out").exists()


def test_the_real_rows_are_written_and_score_full_marks(tmp_path: Path) -> None:
    if not (SHARED / "train.parquet").exists():
        pytest.skip(f"the shared Geometry3K files are not here ({SHARED})")
    written(SHARED, tmp_path, "--split", "train", "--split", "validation")
    assert sizes_of_gold(tmp_path / "train.parquet", tmp_path / "validation.parquet") == [2101 - 105, 300]
    one, other = (pq.read_table(folder / "validation.parquet").to_pylist() for folder in (SHARED, tmp_path))
    for before, after in zip(one, other, strict=True):
        assert [image["bytes"] for image in before["images"]] == [image["bytes"] for image in after["images"]]
        assert (before["problem"], before["answer"]) == (after["problem"], after["answer"])
