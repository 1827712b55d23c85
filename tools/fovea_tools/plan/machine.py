"""GPUs by name, with memory and rates from the vendors' data sheets.

FLOP rates are those of `metrics.throughput`. Memory is the data sheet's number in GiB, of which CUDA reports 1 to 2 %
less (`HEADROOM_FRAC` covers that too). Link rates are for one direction of NVLink, or of PCIe 4.0 and 5.0 with 16
lanes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fovea.config.sections import Cluster, Plan
from fovea.metrics.throughput import DENSE_BF16_TFLOPS
from fovea.models.load import pick_device
from fovea.utils.torchrun import num_processes

GIB = 2**30
HEADROOM_FRAC = 0.1
"""Share of a GPU's memory that must stay free for CUDA's context, NCCL's buffers and fragmentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Name, memory and rates of one GPU, or of the CPU of a process."""

    name: str
    memory_gib: float
    peak_tflops: float | None = None
    """Dense bfloat16 rate; None if unknown."""
    memory_gb_per_second: float | None = None
    """Bandwidth of its memory, in 10^9 bytes per second."""
    link_gb_per_second: float | None = None
    """Bandwidth to another GPU of the machine, one direction."""

    @property
    def is_cuda(self) -> bool:
        return self.name != "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """GPUs of one kind, with one process on each."""

    gpu: Gpu
    gpus: int
    nodes: int
    """Number of computers that hold the GPUs."""

    @property
    def usable_bytes(self) -> int:
        """Bytes of a GPU's memory that a plan may fill."""
        return int(self.gpu.memory_gib * GIB * (1 - HEADROOM_FRAC))

    @property
    def link_gb_per_second(self) -> float | None:
        """Bandwidth between two of the GPUs in one direction; None if a network connects them (several nodes)."""
        return self.gpu.link_gb_per_second if self.nodes == 1 else None


GPUS: Mapping[str, Gpu] = {
    name: Gpu(
        name=name,
        memory_gib=memory_gib,
        peak_tflops=DENSE_BF16_TFLOPS[sheet],
        memory_gb_per_second=bandwidth,
        link_gb_per_second=link,
    )
    for name, memory_gib, sheet, bandwidth, link in (
        ("a100-40", 40, "A100", 1555, 300),  # A100 data sheet: SXM, NVLink 600 GB/s in both directions
        ("a100-80", 80, "A100", 2039, 300),  # the same
        ("h100", 80, "H100", 3350, 450),  # H100 data sheet: SXM, NVLink 900 GB/s
        ("h200", 141, "H200", 4800, 450),  # H200 data sheet: SXM, NVLink 900 GB/s
        ("b200", 180, "B200", 8000, 900),  # HGX B200 data sheet: 1.44 TB for 8, NVLink 1.8 TB/s
        ("l40s", 48, "L40S", 864, 32),  # L40S data sheet: PCIe 4.0, 64 GB/s in both directions
        ("l4", 24, "L4", 300, 32),  # L4 data sheet: the same link
        ("a10", 24, "A10", 600, 32),  # A10 data sheet: the same link
        ("rtx5090", 32, "RTX 5090", 1792, 64),  # RTX Blackwell architecture paper, appendix: PCIe 5.0
        ("rtx4090", 24, "RTX 4090", 1008, 32),  # Ada architecture paper, appendix A
        ("rtx3090", 24, "RTX 3090", 936, 32),  # Ampere GA102 architecture paper, appendix A
    )
}


def machine_of(settings: Plan, cluster: Cluster, device: str) -> Machine:
    """The machine that `plan.gpus` and `plan.gpu` name, or else this one and its cluster.

    `device` is the run's device (`model.device`).
    """
    return Machine(
        gpu=GPUS.get(settings.gpu or "") or _this_machine(settings.gpu or device),
        gpus=settings.gpus or cluster.num_ray_workers or num_processes(),
        nodes=cluster.num_nodes,
    )


def _this_machine(device: str) -> Gpu:
    if pick_device(device).type == "cpu":
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Gpu(name="cpu", memory_gib=memory_bytes / GIB)
    found = torch.cuda.get_device_properties(0)
    known = next((gpu for gpu in GPUS.values() if _is_named(gpu, found.name, found.total_memory)), None)
    return known or Gpu(name=found.name, memory_gib=found.total_memory / GIB)


def _is_named(gpu: Gpu, cuda_name: str, memory_bytes: int) -> bool:
    """True if CUDA's device name ("NVIDIA A100-SXM4-80GB") and memory size match this GPU."""
    product = gpu.name.partition("-")[0]
    words = cuda_name.lower().replace("rtx ", "rtx").replace("-", " ").split()
    return product in words and abs(memory_bytes / GIB / gpu.memory_gib - 1) < 0.1
