"""Settings of the memory allocators of the C library and of torch, for host memory and GPU memory."""

from __future__ import annotations

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
NEVER = 2**31 - 1

GPU_ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""Environment variable with the settings of torch's GPU allocator, read once, when CUDA starts in a process."""
GPU_ALLOCATOR_BEFORE = "PYTORCH_CUDA_ALLOC_CONF"
"""Name of that variable before torch 2.9; torch still reads it."""


def tune_allocators() -> None:
    """Keep freed memory and use large pages; call this before torch creates its first tensor."""
    use_large_pages()
    keep_freed_memory()


def keep_freed_memory() -> bool:
    """Make glibc reuse freed memory instead of returning it to the kernel; False without glibc."""
    # by default, glibc returns a freed large block to the kernel, which zeroes the next one page by page: a step that
    # allocates and frees gigabytes of activations loses up to a third of its time to that
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(M_MMAP_MAX, 0)) and bool(libc.mallopt(M_TRIM_THRESHOLD, NEVER))


def use_large_pages() -> None:
    """Make torch ask Linux for pages of 2 MiB for large CPU tensors; call this before it creates the first one.

    Does nothing if `THP_MEM_ALLOC_ENABLE` is set (PyTorch's name for it, c10/core/impl/alloc_cpu.cpp).
    """
    # passes over memory are a quarter faster, steps 1 to 4 % faster; a large tensor takes up to 2 MiB more
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def use_expandable_segments() -> None:
    """Let torch's segments of GPU memory grow, unless its allocator is already configured; call before CUDA starts.

    Micro-batches differ in size, so a freed block rarely fits the next one; unless its segment can grow, its memory is
    lost to fragmentation.
    """
    if os.environ.keys().isdisjoint((GPU_ALLOCATOR, GPU_ALLOCATOR_BEFORE)):
        os.environ[GPU_ALLOCATOR] = "expandable_segments:True"


def return_freed_memory() -> None:
    """Return freed memory to the kernel once, for allocations outside the heap; does nothing without glibc."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
