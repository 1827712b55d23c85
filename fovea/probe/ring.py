"""Check of the links between the GPUs of a machine: a sum over all of them, its values and its rate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from fovea.probe.checks import CheckFailed
from fovea.probe.rates import best_seconds

CPU_PROCESSES = 2
NUM_BYTES = {"cuda": 2**28, "cpu": 2**20}


def ring(device: torch.device) -> Iterator[str]:
    """Sum a tensor over one process per GPU, by NCCL; by gloo over two processes on a CPU."""
    count = torch.cuda.device_count() if device.type == "cuda" else CPU_PROCESSES
    if count == 1:
        yield "one GPU: nothing to connect"
        return
    with TemporaryDirectory(prefix="fovea-doctor-") as folder:
        spawn(_one_of_the_ring, (count, device.type, folder), nprocs=count)
        seconds = float(Path(folder, "seconds").read_text())
    # each GPU sends and receives all but its own part twice, as NCCL's tests count it ("bus bandwidth")
    rate = 2 * (count - 1) / count * NUM_BYTES[device.type] / seconds
    yield f"{count} processes: right; {rate / 1e9:,.1f} GB/s"


def _one_of_the_ring(rank: int, count: int, kind: str, folder: str) -> None:
    if kind == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(Path(folder, "store")), count)  # type: ignore[attr-defined]  # public, though not listed
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=count)
    try:
        found = torch.full((1024,), float(rank + 1), device=kind)
        dist.all_reduce(found)
        if not bool((found == count * (count + 1) / 2).all()):
            raise CheckFailed(f"rank {rank} got a sum of {float(found[0])} over the ranks 1 to {count}")
        large = torch.zeros(NUM_BYTES[kind] // 4, device=kind)
        seconds = best_seconds(lambda: dist.all_reduce(large), kind)
        if rank == 0:
            Path(folder, "seconds").write_text(str(seconds))
    finally:
        dist.destroy_process_group()
