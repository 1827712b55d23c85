"""Throughput of a step and model FLOPs utilisation (MFU) of its update.

FLOPs come from the policy (`update_tflop`): they are computed from the model's sizes, including images, not measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fovea.types import Group, Metrics

DENSE_BF16_TFLOPS: Mapping[str, float] = {
    "B200": 2250,  # HGX B200 data sheet: 4.5 PFLOP/s with sparsity
    "GB200": 2500,  # GB200 NVL72 data sheet: 5 with sparsity for each GPU
    "H200 NVL": 835.5,  # H200 data sheet: 1,671 with sparsity
    "H200": 989.5,  # the same, SXM: 1,979
    "GH200": 989.5,  # GH200 data sheet: 990
    "H100 NVL": 835.5,  # H100 data sheet: 1,671 with sparsity
    "H100 PCIe": 756.5,  # H100 PCIe data sheet: 1,513
    "H100": 989.5,  # H100 data sheet, SXM: 1,979
    "A100": 312,  # A100 data sheet, PCIe and SXM alike
    "A40": 149.7,  # A40 data sheet
    "A30": 165,  # A30 data sheet
    "A10": 125,  # A10 data sheet
    "L40S": 362.05,  # L40S data sheet
    "L40": 181.05,  # L40 data sheet
    "L4": 121,  # L4 data sheet: 242 with sparsity
    "RTX 5090": 209.5,  # RTX Blackwell architecture paper, appendix: float32 sums
    "RTX 4090": 165.2,  # Ada architecture paper, appendix A: float32 sums
    "RTX 3090": 71,  # Ampere GA102 architecture paper, appendix A: float32 sums
}
"""Dense bfloat16 tensor-core peak in TFLOP/s (NVIDIA's data sheets, without 2:4 sparsity), by words in the device name
that CUDA reports."""
# a device name with one of these words is a different product than the one in the table, or a slice of it
SLOWER_SIBLINGS = {"laptop", "d", "ti", "mig", "max"}


def known_peak_tflops(device_name: str) -> float | None:
    """Peak TFLOP/s of a device by its CUDA name ("NVIDIA H100 80GB HBM3"); None if it is not in the table."""
    # whole words, so that "A10" does not match an A100
    words = set(re.split(r"[\s-]+", device_name.lower()))
    if words & SLOWER_SIBLINGS:
        return None
    fitting = [name for name in DENSE_BF16_TFLOPS if set(name.lower().split()) <= words]
    # "H100 PCIe" before "H100": the entry with the most words wins
    most_precise = max(fitting, key=lambda name: len(name.split()), default=None)
    return None if most_precise is None else DENSE_BF16_TFLOPS[most_precise]


def rates(groups: Sequence[Group], metrics: Mapping[str, float], peak_tflops: float | None) -> Metrics:
    """Completions and tokens per second of the step; TFLOP/s of the update, and its MFU if the peak is known."""
    episodes = [episode for group in groups for episode in group.episodes]
    tokens = sum(episode.num_action_tokens for episode in episodes)
    found = {
        "samples_per_second": len(episodes) / metrics["seconds/step"],
        "tokens_per_second": tokens / metrics["seconds/step"],
    }
    if "update_tflop" in metrics:
        found["tflops_per_second"] = metrics["update_tflop"] / metrics["seconds/update"]
        if peak_tflops is not None:
            found["mfu"] = found["tflops_per_second"] / peak_tflops
    return found
