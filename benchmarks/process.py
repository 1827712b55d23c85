"""Processes of the benchmarks: one thread, and an allocator that keeps its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# by default glibc returns memory to the kernel after every step, and TRL loses a third of its time to page faults
MALLOC = {"MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_MMAP_MAX_": "0", "THP_MEM_ALLOC_ENABLE": "1"}


def restart_with_tuned_malloc(module: str) -> None:
    """Restart this process with tuned malloc settings; returns only in the restarted one."""
    # malloc reads its settings when a process starts; what is set already stays, to compare with it
    if not MALLOC.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**MALLOC, **os.environ})


def last_line(module: str, *arguments: str, **variables: str) -> Any:
    """Run a benchmark in a separate process; returns the value of the JSON that it prints last.

    `variables` of the environment win over this process's own.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def last_number(module: str, *arguments: str) -> float:
    """The same with this module's allocator, for a number."""
    return float(last_line(module, *arguments, **{**MALLOC, **os.environ}))


def children(process: int) -> list[int]:
    """Ids of the child processes of a process; none where it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def is_running(process: int) -> bool:
    """True if a process runs, or is stopped; one that has ended and is not yet waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
