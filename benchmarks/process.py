"""Processes of the benchmarks, with a malloc that keeps freed memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# by default glibc returns memory to the kernel after every step, and page faults take a third of TRL's time
MALLOC = {"MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_MMAP_MAX_": "0", "THP_MEM_ALLOC_ENABLE": "1"}


def restart_with_tuned_malloc(module: str) -> None:
    """Restart this process with tuned malloc settings; the function returns only in the restarted process."""
    # malloc reads its settings when a process starts; variables that the user has set are kept
    if not MALLOC.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**MALLOC, **os.environ})


def last_line(module: str, *arguments: str, **variables: str) -> Any:
    """Run a benchmark in a separate process; returns the JSON value in the last line of its output.

    Environment `variables` override those of this process.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def last_number(module: str, *arguments: str) -> float:
    """Run a benchmark in a separate process with tuned malloc settings; returns the number that it prints last."""
    return float(last_line(module, *arguments, **{**MALLOC, **os.environ}))


def children(process: int) -> list[int]:
    """The ids of the child processes of a process; empty if it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def is_running(process: int) -> bool:
    """True if a process runs or is stopped; False if it has ended, also if it is a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
