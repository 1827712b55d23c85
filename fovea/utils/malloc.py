"""Settings of the memory allocators of the C library and of torch, on the host and on a GPU."""

from __future__ import annotations

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
NEVER = 2**31 - 1

GPU_ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""Variable of torch's settings of its allocator on a GPU, which reads it once, when CUDA starts in a process."""
GPU_ALLOCATOR_BEFORE = "PYTORCH_CUDA_ALLOC_CONF"
"""Its name before torch 2.9, which still counts."""


def tune_allocators() -> None:
    """Keep freed memory, and use large pages; before torch makes its first tensor."""
    use_large_pages()
    keep_freed_memory()


def keep_freed_memory() -> bool:
    """Make glibc reuse freed memory instead of returning it to the kernel; False where there is no glibc."""
    # by default a large block goes back to the kernel when it is freed, and the next one of its size is zeroed page by
    # page: a step that allocates and frees gigabytes of activations loses up to a third of its time to that
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(M_MMAP_MAX, 0)) and bool(libc.mallopt(M_TRIM_THRESHOLD, NEVER))


def use_large_pages() -> None:
    """Let torch ask Linux for pages of 2 MiB for large tensors on the CPU, before it makes the first one.

    Does nothing where `THP_MEM_ALLOC_ENABLE` is set (PyTorch's name for it, c10/core/impl/alloc_cpu.cpp).
    """
    # passes over memory are a quarter faster, a step 1 to 4 %; a large tensor takes up to 2 MiB more
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def use_expandable_segments() -> None:
    """Let torch's segments of a GPU's memory grow, unless its allocator is set already; before CUDA starts.

    Micro-batches differ in size: a block that was freed for one seldom fits the next, and is lost between others unless
    its segment can grow.
    """
    if os.environ.keys().isdisjoint((GPU_ALLOCATOR, GPU_ALLOCATOR_BEFORE)):
        os.environ[GPU_ALLOCATOR] = "expandable_segments:True"


def return_freed_memory() -> None:
    """Return freed memory to the kernel once, for allocations that do not come from the heap; nothing without glibc."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
