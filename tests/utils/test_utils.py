"""Hashes of tensors, memory and commands in their own processes, and texts that a run may show."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import fovea
from fovea.cli import main as cli
from fovea.config.loading import dump_config, load_config, public_settings
from fovea.config.run import Config
from fovea.metrics.progress import Progress
from fovea.report.about import CONFIG_FILE
from fovea.run.folder import open_run_folder
from fovea.utils.checksum import PLACE_MULTIPLIER, ROW, ROWS_AT_ONCE, bit_hash, combined, read_hashes
from fovea.utils.malloc import keep_freed_memory
from fovea_gym.errors import DataError
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.readers.remote import local_copy
from gym_tests.tables import table
from tests.runs import run_program

SIZES = (1, 7, 2 * ROW + 3, 2 * ROW * (ROWS_AT_ONCE + 1) + 5)
"""Below a word, with a part of one, and beyond one and many rows of words."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_of_one_value_shows_at_every_place(size: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(size).to(dtype)
    places = {0, size // 2, size - 1}
    hashes = {int(bit_hash(tensor))}
    for place in places:
        changed = tensor.clone()
        changed[place] += 1
        hashes.add(int(bit_hash(changed)))
    assert len(hashes) == 1 + len(places)


def test_values_that_change_places_show_and_where_they_lie_does_not() -> None:
    tensor, whole = torch.randn(4, 2 * ROW), torch.randn(100, 3)
    assert len({int(bit_hash(each)) for each in (tensor, tensor.flip(0), tensor.flip(1), -tensor, tensor.T)}) == 5
    for part in (whole[1:], whole[:, 1], whole[7, :1], whole.T):
        assert bit_hash(part) == bit_hash(part.clone(memory_format=torch.contiguous_format))


def test_the_hash_is_the_sum_modulo_two_to_the_64_of_words_times_multipliers() -> None:
    """With numbers of Python, which do not wrap, for a tensor below one row."""
    tensor = torch.randint(-(2**63), 2**63 - 1, (5,))
    factors = [(place * PLACE_MULTIPLIER ^ place >> 7) | 1 for place in range(5)]
    total = sum(word * factor for word, factor in zip(tensor.tolist(), factors, strict=True)) * PLACE_MULTIPLIER
    assert int(bit_hash(tensor)) % 2**64 == total % 2**64


def test_groups_of_hashes_are_read_apart_and_their_order_counts() -> None:
    tensors = [torch.full((3,), number) for number in range(3)]
    one, two, three = (int(bit_hash(tensor)) for tensor in tensors)
    assert read_hashes([bit_hash(tensors[0])], [], list(map(bit_hash, tensors[1:]))) == [[one], [], [two, three]]
    assert read_hashes([], []) == [[], []]
    assert combined([1, 2]) != combined([2, 1])
    assert all(0 <= combined([bits]) < 2**32 for bits in (2**63 - 1, -(2**63)))


SCRIPT = """
import os, subprocess, sys
from fovea_gym.utils.launch import with_this_fovea

command = [sys.executable, "-P", "-c", "import fovea; print(fovea.__file__)"]
subprocess.run(command, env=with_this_fovea(os.environ), check=True)
"""


def test_a_fovea_of_the_working_directory_is_that_of_its_children(tmp_path: Path) -> None:
    """Also where another one is installed."""
    (tmp_path / "fovea").symlink_to(Path(fovea.__file__).parent)
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = run_program([sys.executable, "-c", SCRIPT], own, cwd=tmp_path)
    assert done.stdout.strip() == str(tmp_path / "fovea" / "__init__.py"), done.stderr


FAULTS_OF_BLOCKS = """
import resource, torch
from fovea.utils.malloc import keep_freed_memory
def faults():
    for _ in range(20): torch.ones(16 * 2**20)  # small blocks settle between the large ones first
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10): torch.ones(16 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
returned = faults()
assert keep_freed_memory()
print(returned, faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_a_freed_block_is_used_again_without_the_kernel() -> None:
    returned, kept = map(int, run_program([sys.executable, "-c", FAULTS_OF_BLOCKS], dict(os.environ)).stdout.split())
    assert kept < returned / 3


def test_elsewhere_it_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert not keep_freed_memory()


EXPANDABLE = """
from fovea.utils.malloc import use_expandable_segments
use_expandable_segments()
import os
print([os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")])
"""


@table(
    ("given", "found"),
    [
        ({}, ["expandable_segments:True", None]),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, ["max_split_size_mb:64", None]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, [None, "expandable_segments:False"]),
    ],
)
def test_segments_of_a_gpu_grow_unless_the_user_says_otherwise(given: dict[str, str], found: list[str | None]) -> None:
    own = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    assert run_program([sys.executable, "-c", EXPANDABLE], own | given).stdout.strip() == str(found)


LARGE_PAGES = """
import sys
from fovea.utils.malloc import use_large_pages
use_large_pages()
import torch
if "fovea" in sys.argv: import fovea.wiring.run
kept = torch.ones(64 * 2**20)
print(open("/proc/self/smaps_rollup").read().split("AnonHugePages:")[1].split()[0])
"""
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not THP.exists() or "[never]" in THP.read_text(), reason="a kernel with large pages")
@pytest.mark.parametrize(("setting", "uses"), [(None, True), ("0", False)])
def test_large_tensors_have_large_pages(setting: str | None, uses: bool) -> None:
    if not uses and "[always]" in THP.read_text():
        pytest.skip("pages are large everywhere")
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    environment |= {} if setting is None else {"THP_MEM_ALLOC_ENABLE": setting}
    # without what a run imports, of which nothing may make a tensor earlier, only where pages are to be large
    imports = ["fovea"] if uses else []
    done = run_program([sys.executable, "-c", LARGE_PAGES, *imports], environment)
    assert (int(done.stdout) > 0) == uses


URL = "https://bob:hunter2@host.org/rows.parquet?version=3&X-Amz-Signature=abc123&token=t0psecret#part"


def config_of(folder: Path, **settings: object) -> Config:
    environment = {"name": "geo3k", "train_files": [URL], "test_files": ["rows.parquet"], "dev_files": None}
    given = {"model": {"tiny": {}}, "run_dir": str(folder), "environment": environment, **settings}
    return Config.model_validate(given)


def test_a_run_uses_its_urls_and_writes_none_of_their_keys_and_resumes(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    with open_run_folder(config):
        written = (tmp_path / "run" / CONFIG_FILE).read_text()
        (tmp_path / "run" / "checkpoints" / "step-1").mkdir(parents=True)
    assert "version=3" in written
    for text in (written, dump_config(config), str(public_settings(config))):
        assert not any(secret in text for secret in ("hunter2", "abc123", "t0psecret"))
    assert config.environment.train_files == (URL,)  # type: ignore[union-attr]
    with open_run_folder(config_of(tmp_path / "run", resume="auto")):
        pass  # with the same URLs it is the same run


def test_settings_read_back_say_which_key_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config_of(tmp_path / "run")))
    (url,) = load_config([file], []).environment.train_files  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"had a password or key.*add environment.train_files=\[\.\.\.\] with the"):
        local_copy(url, "environment.train_files", RowAccess(cache_dir=tmp_path))


def test_text_of_rows_does_not_reach_the_terminal_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    progress = Progress(1, 0, True, console=Console(file=out))
    progress.print(f"row \x1b]0;title\x07 at {URL}")
    progress.stage("reading \x1b[31mred")
    assert not any(secret in out.getvalue() for secret in ("\x1b", "hunter2"))
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(cli.app, ["train", "no\x1b[2Jrecipe.yaml"]).stderr
    assert error.startswith("error: no�[2Jrecipe.yaml: no such recipe")
