"""Fovea on one large NVIDIA GPU with a model of Qwen3-VL-2B's shape, in less than ten minutes.

    python -m benchmarks.gpu --json gpu.json
    python -m benchmarks.gpu --tiny            # test the program on a CPU, in seconds; its figures mean nothing
    python -m benchmarks.gpu --count           # bytes that a decode step reads, counted without a GPU

It has four parts: agreement with the CPU; the engine's decoding speed, compared with its memory traffic; the MFU of an
update; and a whole step compared with TRL's, if TRL is installed. Weights are random. Prompts are like Geometry3K's,
with one 512 px image (256 visual tokens) and about 100 tokens of text.
"""

from __future__ import annotations

import argparse
import json
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import gpu_count
from benchmarks.cases import Case
from benchmarks.gpu_model import QWEN3_VL_2B, SMALL
from benchmarks.gpu_parts import Figures, Setting, against_trl, decoding, fresh_parts, give_back_memory, parity, steps
from benchmarks.ours import share
from benchmarks.printing import as_table, show
from benchmarks.timing import Budget
from fovea.config.model import TinyModel
from fovea.metrics.throughput import known_peak_tflops
from fovea.models.shared_prefix.attention import Kernel
from fovea.weights.sync import SharedWeights
from fovea_gym.utils.event_loop import wait_for
from fovea_tools.probe.rates import measure_rates

MODULE = "benchmarks.gpu"
SECONDS = 540.0
SHARES = {"parity": 0.1, "decoding": 0.2, "steps": 0.35, "trl": 0.35}
GOALS = {"times": 5.0, "MFU": 0.35, "of floor as read": 0.6}
"""Goals by column. The MFU is that of an update without recomputation, which is estimated to reach at most .36 to .40.
The decoding goal is a share of the floor in which TILE_ROWS completions read their prompt together."""
VARIANTS: tuple[tuple[torch.dtype, Kernel], ...] = (
    (torch.float32, "eager"),
    (torch.float32, "sdpa"),
    (torch.float32, "auto"),
    (torch.bfloat16, "sdpa"),
    (torch.bfloat16, "auto"),
    # last, since a device may not support them; auto then chooses another
    (torch.bfloat16, "varlen_gathered"),
    (torch.bfloat16, "varlen"),
)
TIMED_STEPS = 2
LARGEST = Case(
    model=TinyModel(),  # a placeholder, since the model is passed in
    vocabulary=None,
    image_side_px=512,
    prompts=64,
    samples=8,
    completion_tokens=512,
    question_words=18,
    gradient_checkpointing="none",  # `steps` falls back to selective if memory runs out
    max_batch_tokens=320_000,
    microbatch_tokens=16_384,  # three whole groups: with less than one group (4,500 tokens) no prompt is shared
)
TINY = replace(LARGEST, image_side_px=64, prompts=4, samples=2, completion_tokens=6, trl_rows_per_microbatch=4)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    if options.count:
        show(gpu_count.table())
        return
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a CUDA device; use --tiny to test it without one")
    # rollout and update alternate and allocate blocks of very different sizes; CUDA reads this at its first use
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    budget = Budget(options.seconds)
    setting = _setting(tiny=options.tiny)
    about = {"device": _device_name(setting.device), "torch": torch.__version__, "peak": setting.peak}
    findings = Findings({**about, "rates": asdict(setting.rates)}, options.json)
    run_parts(setting, budget, findings, tiny=options.tiny)
    if findings.failed:
        raise SystemExit(f"failed: {', '.join(findings.failed)}; see the tracebacks above")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="use a small model on the CPU, to test the program")
    parser.add_argument("--count", action="store_true", help="only count what a decode step reads; needs no GPU")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="approximate time limit of the whole program")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args(arguments)


def _setting(*, tiny: bool) -> Setting:
    device, dtype = ("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)
    rates = measure_rates(device, dtype, gemm_side=256 if tiny else 8192, num_bytes=2**20 if tiny else 2**33)
    known = known_peak_tflops(_device_name(device))
    peak, source = (rates.gemm, "the measured products") if known is None else (known * 1e12, "the data sheet")
    print(f"{_device_name(device)}, torch {torch.__version__}")
    print(f"measured: products {rates.gemm / 1e12:,.2f} TFLOP/s, attention {rates.attention / 1e12:,.2f} TFLOP/s")
    print(f"measured: reading {rates.read / 1e9:,.0f} GB/s, copying {rates.copy / 1e9:,.0f} GB/s (both ways counted)")
    print(f"MFU is a share of {peak / 1e12:,.2f} TFLOP/s, {source}")
    shape, case = (SMALL, TINY) if tiny else (QWEN3_VL_2B, LARGEST)
    return Setting(device=device, dtype=dtype, shape=shape, case=case, rates=rates, peak=peak)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


class Findings:
    """Results of the parts, printed and saved row by row, so that an interrupted call loses at most one row."""

    def __init__(self, about: Mapping[str, object], path: str | None) -> None:
        self._about = about
        self._path = path
        self.rows: dict[str, list[Figures]] = {}
        self.failed: list[str] = []

    def part(self, name: str, title: str, rows: Iterator[Figures]) -> None:
        """Run a part and print its results; an error ends only this part, which is added to `failed`."""
        found = self.rows[name] = []
        try:
            for row in rows:
                found.append(row)
                print(f"{name}: {', '.join(f'{key} {_shown(value)}' for key, value in row.items())}", flush=True)
                self._save()
        except Exception:  # later parts should run after any error of a kernel, memory or TRL
            traceback.print_exc()
            self.failed.append(name)
            give_back_memory()
        _print(title, found)
        self._save()

    def _save(self) -> None:
        if self._path:
            Path(self._path).write_text(json.dumps({**self._about, **self.rows}, indent=2) + "\n")


def run_parts(setting: Setting, budget: Budget, findings: Findings, *, tiny: bool) -> None:
    """Run all parts in order."""
    cases = [replace(setting.case, prompts=prompts) for prompts in ([2, 4] if tiny else [8, 16, 64])]
    sequences = [4, 8] if tiny else [64, 128, 256]
    # without TRL, the other parts share its time
    shares = {name: share for name, share in SHARES.items() if name != "trl" or find_spec("trl") is not None}
    shares = {name: share / sum(shares.values()) for name, share in shares.items()}
    deadline = budget.part(shares["parity"])
    findings.part(
        "parity",
        "A tiny model: mean |log-prob - that of float32 on the CPU|, and the gradient norm",
        parity(setting.device, VARIANTS, deadline),
    )
    shared = share(setting.case, fresh_parts(setting), setting.device)
    wait_for(SharedWeights(shared.engine).sync(0))
    deadline = budget.part(shares["decoding"])
    findings.part("decoding", "Decoding", decoding(setting, shared, sequences, deadline))
    deadline = budget.part(shares["steps"])
    findings.part("steps", "Our step", steps(setting, shared, cases, TIMED_STEPS, deadline))
    deadline = budget.part(shares.get("trl", 0.0))
    title = "Whole step against TRL with transformers' generation"
    findings.part("trl", title, against_trl(setting, shared, cases, TIMED_STEPS, deadline))


def _print(title: str, rows: Sequence[Figures]) -> None:
    if not rows:
        return
    headers = [f"{key} (goal {GOALS[key]:g})" if key in GOALS else key for key in rows[0]]
    cells = ([_shown(x) for x in row.values()] for row in rows)
    show(as_table(title, headers, cells, num_left=0))


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}"


if __name__ == "__main__":
    main()
