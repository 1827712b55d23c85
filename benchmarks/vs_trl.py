"""Fovea against TRL's GRPOTrainer: the same weights, rows, group size and completion lengths, step by step in turn.

    python -m benchmarks.vs_trl --cases tiny,mid --steps 5 --json result.json

Counted on both sides: image processing, tokenising, sampling, log-probs, rewards, loss, clipping, metrics, AdamW.
Figures are medians over the steps after one warm-up step. Peak memory is measured in a separate process for each side.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cases import CASES, FAMILIES, Case
from benchmarks.ours import Ours
from benchmarks.process import last_number, restart_with_tuned_malloc
from benchmarks.timing import StepTimes, medians, spread
from fovea.metrics.log import peak_rss_gib

MODULE = "benchmarks.vs_trl"
WARM_STEPS = 1
THREADS = 1


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    if options.alone:
        _run_alone(options.alone, CASES[options.cases[0]], options.steps)
        return
    restart_with_tuned_malloc(MODULE)
    torch.set_num_threads(THREADS)
    results = {name: _compare(name, options.steps, memory=not options.no_memory) for name in options.cases}
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")
    Console().print(_table(results))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vs_trl", description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=_case_names, default=_default_cases(), help=_cases_help())
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each side")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--no-memory", action="store_true", help="skip the two processes that measure peak memory")
    parser.add_argument("--alone", choices=("ours", "trl"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _default_cases() -> list[str]:
    """Names of all cases, each once: many_8 equals image_heavy."""
    return [name for name in CASES if name != "many_8"]


def _cases_help() -> str:
    return f"comma-separated: {', '.join(CASES)}; many stands for {', '.join(FAMILIES['many'])}"


def _case_names(text: str) -> list[str]:
    names = [name for word in text.split(",") for name in FAMILIES.get(word, (word,))]
    for name in names:
        if name not in CASES:
            raise argparse.ArgumentTypeError(f"no case {name!r}; there are {', '.join([*CASES, *FAMILIES])}")
    return names


def _compare(name: str, steps: int, *, memory: bool) -> dict[str, dict[str, float]]:
    """Time both sides in turn, in this process."""
    from benchmarks import trl_side  # noqa: PLC0415  the process that measures Fovea's memory must not import TRL

    case, total = CASES[name], steps + WARM_STEPS
    ours, our_times, their_times = Ours(case, total), list[StepTimes](), list[StepTimes]()

    def after(theirs: StepTimes) -> None:
        their_times.append(theirs)
        our_times.append(ours.step())
        mine = our_times[-1]
        assert theirs.tokens == mine.tokens, f"{name}: TRL drew {theirs.tokens} tokens, we {mine.tokens}"
        print(f"{name}: TRL {theirs.step:.2f} s, ours {mine.step:.2f} s, {theirs.step / mine.step:.2f}x", flush=True)

    trl_side.train(case, total, after)
    our_times, their_times = our_times[WARM_STEPS:], their_times[WARM_STEPS:]
    result = {"ours": medians(our_times), "trl": medians(their_times)}
    ratios = {
        key: result["trl"][f"{key}_seconds"] / result["ours"][f"{key}_seconds"] for key in ("step", "rollout", "train")
    }
    result["spread"] = {"ours": spread(our_times), "trl": spread(their_times)}
    for side in ("ours", "trl") if memory else ():
        result[side]["peak_rss_gib"] = last_number(MODULE, "--alone", side, "--cases", name, "--steps", "2")
    return result | {"speedup": ratios}


def _run_alone(side: str, case: Case, steps: int) -> None:
    torch.set_num_threads(THREADS)
    if side == "ours":
        ours = Ours(case, steps)
        for _ in range(steps):
            ours.step()
    else:
        from benchmarks import trl_side  # noqa: PLC0415

        trl_side.train(case, steps, lambda _times: None)
    print(peak_rss_gib())


def _table(results: dict[str, dict[str, dict[str, float]]]) -> Table:
    table = Table(title="Seconds a step (median) and how many times faster Fovea is than TRL")
    for header in ("case", "ours", "TRL", "step", "rollout", "train", "spread ours/TRL", "GiB ours/TRL"):
        table.add_column(header, justify="left" if header == "case" else "right")
    for name, result in results.items():
        ours, trl, speedup, spreads = (result[key] for key in ("ours", "trl", "speedup", "spread"))
        table.add_row(
            name,
            f"{ours['step_seconds']:.2f}",
            f"{trl['step_seconds']:.2f}",
            *(f"{speedup[key]:.2f}x" for key in ("step", "rollout", "train")),
            f"{spreads['ours']:.0%} / {spreads['trl']:.0%}",
            f"{ours.get('peak_rss_gib', 0):.2f} / {trl.get('peak_rss_gib', 0):.2f}",
        )
    return table


if __name__ == "__main__":
    main()
