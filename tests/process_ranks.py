"""Processes that are the ranks of one gloo process group on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.warm import run_ranks

PATIENCE = timedelta(seconds=240)


def run_group(target: Callable[..., None], *arguments: Any, num_ranks: int = 2) -> None:
    """Run `target(rank, *arguments)` in so many processes of a group to the end."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    run_ranks(_join, (target, store.port, num_ranks, arguments), nprocs=num_ranks)


def found_by_ranks(
    find: Callable[..., dict[str, Any]], *arguments: Any, folder: Path, num_ranks: int = 2
) -> list[dict[str, Any]]:
    """What `find(rank, *arguments)` returns in each of so many processes of a group, of what JSON can hold."""
    run_group(_write, find, folder, arguments, num_ranks=num_ranks)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def _write(rank: int, find: Callable[..., dict[str, Any]], folder: Path, arguments: tuple[Any, ...]) -> None:
    (folder / f"{rank}.json").write_text(json.dumps(find(rank, *arguments)))


def _join(rank: int, target: Callable[..., None], port: int, num_ranks: int, arguments: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=PATIENCE)
    target(rank, *arguments)
    dist.destroy_process_group()
