"""How memory is allocated, in their own processes, since there is no way back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fovea.utils.malloc import keep_freed_memory

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
    done = subprocess.run([sys.executable, "-c", FAULTS_OF_BLOCKS], capture_output=True, text=True, check=True)
    returned, kept = map(int, done.stdout.split())
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


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, ["expandable_segments:True", None]),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, ["max_split_size_mb:64", None]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, [None, "expandable_segments:False"]),
    ],
)
def test_segments_of_a_gpu_may_grow_unless_the_user_says_something_else(
    given: dict[str, str], found: list[str | None]
) -> None:
    own = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE], env=own | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(found)


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
    done = subprocess.run(
        [sys.executable, "-c", LARGE_PAGES, *imports], env=environment, capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) > 0) == uses
