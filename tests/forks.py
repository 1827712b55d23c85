"""Processes that begin where their imports have ended: forks of one that has imported torch, transformers and Fovea.

Six seconds of imports are most of a short test's process. Whatever it does after them, its signals and its death, is
that of a process that was started anew.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch.multiprocessing

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["fovea.build.run", "fovea.loop", "tests.train.rank_policies"])


def run_ranks(target: Callable[..., None], arguments: tuple[Any, ...], nprocs: int) -> None:
    """Run `target(rank, *arguments)` in so many processes to the end; an error of one is raised here."""
    torch.multiprocessing.start_processes(_traced, (target, *arguments), nprocs=nprocs, start_method="forkserver")


def _traced(rank: int, target: Callable[..., None], *arguments: Any) -> None:
    """Run `target` so that a signal that ends the process, such as SIGSEGV, leaves the stacks of its threads."""
    faulthandler.enable()
    target(rank, *arguments)
