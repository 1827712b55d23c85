"""The C library keeps freed blocks: in a process of its own, since there is no way back."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fovea.utils.malloc import keep_freed_memory

FAULTS_OF_BLOCKS = """
import resource, sys, torch
from fovea.utils.malloc import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def make(): torch.ones(16 * 2**20)
make()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30): make()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS_OF_BLOCKS, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_a_freed_block_is_used_again_without_the_kernel() -> None:
    # not at once: small blocks settle between the large ones first
    assert page_faults("keep") < page_faults("default") / 3


def test_elsewhere_it_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert not keep_freed_memory()
