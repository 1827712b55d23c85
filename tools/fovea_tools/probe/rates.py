"""Measured rates of a machine: matrix products, attention and memory traffic, each the best of several tries."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.spawn import spawn

from fovea.rollout.embedded.decode_step import CudaCapture
from fovea_tools.plan.machine import Machine

FOVEA = str(Path(__file__).parents[2])


class CheckFailed(Exception):
    """Raised when a check finds something wrong; its text says what."""


@dataclass(frozen=True, slots=True)
class Check:
    """A named check."""

    name: str
    lines: Callable[[], Iterator[str]]
    """Yields the findings line by line; any exception is a failure."""


def run_checks(checks: Sequence[Check], say: Callable[[str], None]) -> list[str]:
    """Run all checks, even after failures, and return the names of those that failed."""
    started, failed = perf_counter(), list[str]()
    for check in checks:
        say(f"[{perf_counter() - started:5.1f} s] {check.name}")
        try:
            for line in check.lines():
                say(f"    {line}")
        except CheckFailed as error:
            failed.append(check.name)
            say(f"    FAILED: {error}")
        except Exception as error:  # a kernel, driver or package may raise anything; the other checks go ahead
            failed.append(check.name)
            say(f"    FAILED: {error_text(error)}")
    return failed


def error_text(error: Exception) -> str:
    """Type and first line of an error, and the last line of Fovea in its traceback."""
    first = (str(error).splitlines() or ["no message"])[0]
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(FOVEA)]
    return f"{type(error).__name__}: {first} ({Path(places[-1].filename).name}:{places[-1].lineno})"


TRIES = 5
BEYOND_CACHE_BYTES = 2**30
"""More bytes than the caches of current machines can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Operations and bytes per second; a multiplication and an addition count as two operations."""

    gemm: float
    """Rate of large matrix products."""
    attention: float
    """Rate of fused attention without a mask."""
    read: float
    copy: float
    """Rate of copying, which counts the bytes read and those written."""


def measure_rates(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    gemm_side: int = 2048,
    num_bytes: int = BEYOND_CACHE_BYTES,
) -> Rates:
    """Measure the rates of torch's operators, with its current number of threads."""
    large = torch.ones(num_bytes // dtype.itemsize, device=device, dtype=dtype)
    other = torch.empty_like(large)
    return Rates(
        gemm=gemm_rate(gemm_side, device, dtype),
        attention=attention_rate(device, dtype),
        read=num_bytes / best_seconds(large.sum, device),
        copy=2 * num_bytes / best_seconds(lambda: other.copy_(large), device),
    )


def gemm_rate(side: int, device: str, dtype: torch.dtype) -> float:
    """Rate of products of square matrices."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / best_seconds(lambda: a @ b, device)


def read_rate(num_bytes: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Rate of reading the same bytes repeatedly; a cache's rate if they fit into the cache."""
    values = torch.ones(num_bytes // dtype.itemsize, device=device, dtype=dtype)
    return num_bytes / best_seconds(values.sum, device)


def attention_rate(device: str, dtype: torch.dtype) -> float:
    """Rate of fused attention without a mask; on a GPU the tensors are so large that the launch does not count."""
    heads, tokens, width = (16, 8192, 128) if device == "cuda" else (8, 1024, 64)
    query, key, value = (torch.randn(1, heads, tokens, width, device=device).to(dtype) for _ in range(3))
    seconds = best_seconds(lambda: F.scaled_dot_product_attention(query, key, value), device)
    return 4 * heads * tokens**2 * width / seconds


def best_seconds(call: Callable[[], object], device: str, tries: int = TRIES) -> float:
    """Seconds of the fastest of several calls, after a warm-up call."""
    call()
    return min(seconds_of(call, device) for _ in range(tries))


def best_kernel_seconds(call: Callable[[], object], device: str, calls: int = 20) -> float:
    """Seconds of a call without its launch, measured on a GPU in a CUDA graph of several calls, as in decoding."""
    if device != "cuda":
        return best_seconds(call, device)

    def several() -> None:
        for _ in range(calls):
            call()

    return best_seconds(CudaCapture()(several), device) / calls


def seconds_of(call: Callable[[], object], device: str) -> float:
    """Seconds of a call, including the wait for the device."""
    synchronize(device)
    started = perf_counter()
    call()
    synchronize(device)
    return perf_counter() - started


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


CPU_PROCESSES = 2
NUM_BYTES = {"cuda": 2**28, "cpu": 2**20}


def ring(device: torch.device) -> Iterator[str]:
    """Sum a tensor over one process per GPU with NCCL, or over two processes on a CPU with gloo."""
    count = torch.cuda.device_count() if device.type == "cuda" else CPU_PROCESSES
    if count == 1:
        yield "one GPU: nothing to connect"
        return
    with TemporaryDirectory(prefix="fovea-doctor-") as folder:
        spawn(_one_of_the_ring, (count, device.type, folder), nprocs=count)
        seconds = float(Path(folder, "seconds").read_text())
    # each GPU sends and receives everything but its part twice: NCCL's tests call this rate "bus bandwidth"
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


GIGA, TERA = 1e9, 1e12
PRODUCT_SIDE = 1024
READ_BYTES = 2**28
"""More bytes than the caches of most CPUs can hold."""


def with_cpu_rates(machine: Machine, dtype: torch.dtype) -> Machine:
    """The machine with this CPU's measured rates, divided among its processes; a machine with GPUs is unchanged.

    Measuring takes a few tenths of a second.
    """
    if machine.gpu.is_cuda:
        return machine
    processes = -(-machine.gpus // machine.nodes)
    gemm, read = gemm_rate(PRODUCT_SIDE, "cpu", dtype), read_rate(READ_BYTES)
    share = replace(machine.gpu, peak_tflops=gemm / TERA / processes, memory_gb_per_second=read / GIGA / processes)
    return replace(machine, gpu=share)
