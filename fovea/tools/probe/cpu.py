"""Rates of this machine's CPU for a plan, by a short measurement."""

from __future__ import annotations

from dataclasses import replace

import torch

from fovea.tools.plan.machine import Machine
from fovea.tools.probe.rates import gemm_rate, read_rate

GIGA, TERA = 1e9, 1e12
PRODUCT_SIDE = 1024
READ_BYTES = 2**28
"""More than the caches of most CPUs hold."""


def with_cpu_rates(machine: Machine, dtype: torch.dtype) -> Machine:
    """The machine with the measured rates of this CPU, of which each process has a share; GPUs stay as they are.

    Measuring takes some tenths of a second.
    """
    if machine.gpu.is_cuda:
        return machine
    processes = -(-machine.gpus // machine.nodes)
    gemm, read = gemm_rate(PRODUCT_SIDE, "cpu", dtype), read_rate(READ_BYTES)
    share = replace(machine.gpu, peak_tflops=gemm / TERA / processes, memory_gb_per_second=read / GIGA / processes)
    return replace(machine, gpu=share)
