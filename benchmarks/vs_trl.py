"""Fovea compared with TRL's GRPOTrainer on the same weights, rows, group sizes and completion lengths.

    python -m benchmarks.vs_trl --cases tiny,mid --steps 5 --json result.json

The two sides take steps alternately. Times include image processing, tokenising, sampling, log-probs, rewards, loss,
clipping, metrics and AdamW. Figures are medians over the steps after one warm-up step. For Fovea, one update in
`train.plain_update_every_steps` is counted as an update that reuses nothing from the rollout. Peak memory is measured
in a separate process for each side.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import torch
from rich.table import Table

from benchmarks.cases import CASES, FAMILIES, Case, Reused
from benchmarks.ours import Ours, peak_gib
from benchmarks.printing import as_table, show
from benchmarks.process import last_number, restart_with_tuned_malloc
from benchmarks.timing import CLOCKS, PHASES, Clock, Speedup, StepTimes, medians, shown_ratio, spread, with_plain_share
from fovea.config.sections import Train
from fovea.metrics.log import peak_rss_gib
from fovea.models.load import DTYPES

MODULE = "benchmarks.vs_trl"
WARM_STEPS = 1
Results = dict[str, dict[str, dict[str, Any]]]
"""The figures of each case, grouped as in the JSON file."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    if options.alone:
        torch.set_num_threads(options.threads)
        case = replace(CASES[options.cases[0]], dtype=options.dtype, reused=options.reused)
        if options.alone == "ours":
            print(peak_gib(case, options.steps))
            return
        from benchmarks import trl_side  # noqa: PLC0415

        trl_side.train(case, options.steps, lambda _times: None)
        print(peak_rss_gib())
        return
    restart_with_tuned_malloc(MODULE)
    torch.set_num_threads(options.threads)
    machine = f"{cpu_model()}, {options.threads} of {os.cpu_count()} cores, {options.dtype}, {options.clock} time"
    results = {}
    for name in options.cases:
        case, clock = replace(CASES[name], dtype=options.dtype, reused=options.reused), CLOCKS[options.clock]
        results[name] = _compare(case, name, options.steps, clock, memory=not options.no_memory)
    if options.json:
        with_machine = {name: result | {"machine": machine} for name, result in results.items()}
        Path(options.json).write_text(json.dumps(with_machine, indent=2) + "\n")
    show(_table(results, machine))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vs_trl", description=__doc__.split("\n")[0])
    cases = f"comma-separated names: {', '.join(CASES)}; many stands for {', '.join(FAMILIES['many'])}"
    once = [name for name in CASES if name != "many_8"]  # it equals image_heavy
    parser.add_argument("--cases", type=_case_names, default=once, help=cases)
    parser.add_argument("--steps", type=int, default=5, help="number of timed steps of each side")
    parser.add_argument("--threads", type=int, default=1, help="number of threads of each side")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the weights on both sides")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="use cpu (processor time) on a busy machine")
    parser.add_argument(
        "--reused", choices=get_args(Reused), default="all", help="what an update reuses of its rollout"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--no-memory", action="store_true", help="skip the two processes that measure peak memory")
    parser.add_argument("--alone", choices=("ours", "trl"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _case_names(text: str) -> list[str]:
    names = [name for word in text.split(",") for name in FAMILIES.get(word, (word,))]
    for name in names:
        if name not in CASES:
            raise argparse.ArgumentTypeError(f"no case {name!r}; choose from {', '.join([*CASES, *FAMILIES])}")
    return names


def _compare(case: Case, name: str, steps: int, clock: Clock, *, memory: bool) -> dict[str, dict[str, Any]]:
    """Time alternating steps of both sides in this process."""
    from benchmarks import trl_side  # noqa: PLC0415  the process that measures Fovea's memory must not import TRL

    total = steps + WARM_STEPS
    ours, our_times, their_times = Ours(case, total + 1, clock=clock), list[StepTimes](), list[StepTimes]()

    def after(theirs: StepTimes) -> None:
        their_times.append(theirs)
        our_times.append(ours.step())
        mine = our_times[-1]
        assert theirs.tokens == mine.tokens, f"{name}: TRL sampled {theirs.tokens} tokens, Fovea {mine.tokens}"
        print(f"{name}: TRL {theirs.step:.2f} s, ours {mine.step:.2f} s, {theirs.step / mine.step:.2f}x", flush=True)

    trl_side.train(case, total, after, clock=clock)
    every, plain = Train().plain_update_every_steps, ours.plain_step()
    spreads = {"ours": spread(our_times[WARM_STEPS:]), "trl": spread(their_times[WARM_STEPS:])}
    our_times = [with_plain_share(times, plain, every) for times in our_times[WARM_STEPS:]]
    their_times = their_times[WARM_STEPS:]
    result = {"ours": medians(our_times) | {"plain_step_seconds": plain.step}, "trl": medians(their_times)}
    for side in ("ours", "trl") if memory else ():
        alone = ["--alone", side, "--cases", name, "--dtype", case.dtype, "--reused", case.reused, "--steps", "2"]
        result[side]["peak_rss_gib"] = last_number(MODULE, *alone, "--threads", str(torch.get_num_threads()))
    speedups = {
        phase: asdict(Speedup.of(*([getattr(times, phase) for times in side] for side in (their_times, our_times))))
        for phase in PHASES
    }
    return result | {"spread": spreads, "speedup": speedups}


def cpu_model() -> str:
    """The name of the processor, as Linux reports it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _table(results: Results, machine: str) -> Table:
    title = "Seconds a step (median) and how many times faster Fovea is than TRL"
    headers = ("case", "ours", "TRL", "step", "paired", "best", "rollout", "train", "spread", "GiB")
    rows = []
    for name, result in results.items():
        ours, trl, speedup, spreads = (result[key] for key in ("ours", "trl", "speedup", "spread"))
        seconds = (f"{ours['step_seconds']:.2f}", f"{trl['step_seconds']:.2f}")
        # a whole step has the ratios of medians, of pairs and of the fastest steps; its halves only that of medians
        found = [speedup["step"][key] for key in ("of_medians", "paired", "of_best")]
        found += [speedup[half]["of_medians"] for half in ("rollout", "train")]
        ratios = (shown_ratio(ratio, tuple(spreads.values())) for ratio in found)
        gib = f"{ours.get('peak_rss_gib', 0):.2f} / {trl.get('peak_rss_gib', 0):.2f}"
        rows.append((name, *seconds, *ratios, f"{spreads['ours']:.0%} / {spreads['trl']:.0%}", gib))
    return as_table(f"{title}; {machine}", headers, rows)


if __name__ == "__main__":
    main()
