"""A run that is killed with SIGKILL at random moments, compared with the same run without kills.

    python -m benchmarks.kills --kills 20 --seed 0 --out runs/kills
    python -m benchmarks.kills --kills 20 --processes 2 --case ppo --out runs/kills-2 train.learning_rate=1e-4

A single process is restarted by `max_restarts`, several by torchrun's --max-restarts. The moments are random but
seeded: most come after the attempt has taken at least one step, the others while it starts. The runs are equal if
metrics.jsonl is equal in every digit except for times, memory and traffic, and the exported weights are equal bit for
bit. The exit code is 1 if they are not.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeAlias

from rich.table import Table

from benchmarks.printing import as_table, show
from benchmarks.process import children, is_running
from fovea.metrics.jsonl import METRICS_FILE
from fovea.metrics.log import read_metrics

SIZES = (
    *("environment.train_size=64", "environment.dev_size=8", "environment.test_size=16", "evaluate.dev_size=8"),
    *("evaluate.image_controls=false", "rollout.prompts_per_step=6", "rollout.samples_per_prompt=4"),
    *("checkpoint.every_steps=2", "log.tensorboard=false"),
)
CASES = {
    "grpo": ("recipes/shapes.yaml", "warmup.max_steps=4", "warmup.check_every_steps=2"),
    "ppo": ("recipes/shapes_ppo.yaml", "warmup.max_steps=4", "warmup.check_every_steps=2", "algorithm.minibatches=2"),
    "lora": ("recipes/shapes.yaml", "warmup=null", "model.lora={rank: 4}", "algorithm.kl={coef: 0.05}"),
    "dynamic": ("recipes/shapes.yaml", "warmup=null", "algorithm.dynamic_sampling={max_gen_batches: 2}"),
    "curriculum": (
        "recipes/shapes.yaml",
        "warmup=null",
        "environment.level=[1, 2, 3]",
        "curriculum.starts=[10, 20]",
        "curriculum.level_weights=[{'2': 0, '3': 0}, {'3': 0}, {}]",
    ),
}
UNEQUAL = (
    *("seconds/", "tokens_per_second", "samples_per_second", "tflops_per_second"),
    *("mfu", "memory/", "waits/", "transfer/"),
)
"""Prefixes of metrics of time, memory and traffic; a resumed run also sends the weights for its parity gate."""
REWARD = "import zlib\n\ndef score(task, text, images):\n    return zlib.crc32(text.encode()) % 7 / 7\n"
"""A reward for random weights: they never answer correctly, and equal rewards would train only on entropy."""
SHARE_AT_START = 0.3
"""Share of the kills that happen while an attempt starts."""
MAX_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The moment at which an attempt is killed."""

    step: int | None
    """Kill after this step, and after at least one step of the attempt; None to kill while it starts."""
    after_seconds: float
    """Seconds from that step, or from the start."""
    rank: int
    """Rank of the process that is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A kill that was carried out."""

    moment: Moment
    taken: int
    """Number of steps in metrics.jsonl at the kill."""


def moments(
    num_kills: int, *, seed: int, steps: int, step_seconds: float, start_seconds: float, ranks: int
) -> list[Moment]:
    """Choose the moments of the kills, in the order of their steps."""
    rng = random.Random(seed)
    num_at_start = sum(rng.random() < SHARE_AT_START for _ in range(num_kills))
    behind: list[int | None] = [*sorted(rng.randint(1, steps - 1) for _ in range(num_kills - num_at_start))]
    for _ in range(num_at_start):
        behind.insert(rng.randint(0, len(behind)), None)
    longest = [start_seconds if step is None else 2 * step_seconds for step in behind]
    return [
        Moment(step=step, after_seconds=rng.uniform(0, most), rank=rng.randrange(ranks))
        for step, most in zip(behind, longest, strict=True)
    ]


Attempt: TypeAlias = tuple[int, ...]
"""The process ids of one attempt, by rank."""


class Launched:
    """A run with its launcher, which restarts it after each kill."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path, ranks: int) -> None:
        self._process = process
        self._run_dir = run_dir
        self._ranks = ranks

    def attempt(self, before: Attempt | None) -> Attempt | None:
        """Wait for the attempt after `before`; None if the run has ended."""
        while self._process.poll() is None:
            time.sleep(0.01)
            pids = _by_rank(self._process.pid, self._ranks)
            if len(pids) == self._ranks and not (before and set(pids) & set(before)):
                return pids
        return None

    def wait_for(self, moment: Moment, attempt: Attempt) -> bool:
        """Wait until the moment comes; False if the attempt ends before."""
        if moment.step is None:
            # or until the attempt's first step: the duration of its start is not known in advance
            return self._steps_taken(0, attempt, until=time.monotonic() + moment.after_seconds)
        return self._steps_taken(moment.step, attempt) and self._goes_on(attempt, moment.after_seconds)

    def end(self) -> int:
        return self._process.wait(MAX_SECONDS)

    def _steps_taken(self, step: int, attempt: Attempt, *, until: float = math.inf) -> bool:
        """Wait for this step and one by this attempt, or for the time `until`; False if the attempt ends before."""
        file = self._run_dir / METRICS_FILE
        own: int | None = None
        inode = _inode(file)
        while self._goes_on(attempt, 0.002):
            taken = len(read_metrics(self._run_dir))
            # an attempt starts by replacing the file with the lines up to its checkpoint
            if own is None and _inode(file) != inode:
                own = taken + 1
            if time.monotonic() >= until or (own is not None and taken >= max(own, step)):
                return True
        return False

    def _goes_on(self, attempt: Attempt, seconds: float) -> bool:
        """Wait for so many seconds; False as soon as the attempt has ended."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not all(map(is_running, attempt)):
                return False
            time.sleep(min(left, 0.01))
        return True


def _inode(file: Path) -> int:
    return file.stat().st_ino if file.exists() else 0


def _by_rank(launcher: int, ranks: int) -> tuple[int, ...]:
    """The training processes of a launcher, by rank."""
    found = [pid for pid in children(launcher) if is_running(pid)]
    if ranks == 1:
        return tuple(found)
    by_rank = {rank: pid for pid in found if (rank := _rank(pid)) is not None}
    return tuple(by_rank[rank] for rank in sorted(by_rank))


def _rank(pid: int) -> int | None:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(each.removeprefix(b"RANK=")) for each in variables if each.startswith(b"RANK=")), None)


@contextmanager
def launched(words: Sequence[str], run_dir: Path, *, ranks: int, max_restarts: int) -> Iterator[Launched]:
    """Start a run with its launcher; processes that are left when the context ends are killed."""
    launcher = [sys.executable, "-m"]
    settings = [*words, f"run_dir={run_dir}"]
    if ranks == 1:
        launcher += ["fovea", "train"]
        settings += [f"max_restarts={max_restarts}"]
    else:
        launcher += ["torch.distributed.run", f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
        launcher += ["--monitor-interval=0.1", "-m", "fovea", "train"]
        settings += ["resume=auto"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with (run_dir.parent / f"{run_dir.name}.log").open("wb") as log:
        process = subprocess.Popen([*launcher, *settings], env=environment, stdout=log, stderr=log)
    try:
        yield Launched(process, run_dir, ranks)
    finally:
        for pid in [process.pid, *children(process.pid)]:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def never_killed(words: Sequence[str], run_dir: Path, ranks: int) -> float:
    """Run to the end without kills; returns the seconds until the first step."""
    started = time.monotonic()
    with launched(words, run_dir, ranks=ranks, max_restarts=0) as run:
        while not read_metrics(run_dir) and run.attempt(None) is not None:
            time.sleep(0.05)
        start_seconds = time.monotonic() - started
        if code := run.end():
            raise SystemExit(f"the run without kills ended with code {code}; see {run_dir}.log")
    if not any(row["groups/with_signal"] for row in read_metrics(run_dir)):
        raise SystemExit(f"no group of {run_dir} had different rewards: nothing was learned, so the comparison is void")
    return start_seconds


def killed(words: Sequence[str], run_dir: Path, planned: Sequence[Moment], ranks: int) -> list[Kill]:
    """Run to the end with a kill at each planned moment; returns the kills."""
    kills: list[Kill] = []
    with launched(words, run_dir, ranks=ranks, max_restarts=2 * len(planned)) as run:
        attempt = run.attempt(None)
        for moment in planned:
            while attempt is not None and not run.wait_for(moment, attempt):
                attempt = run.attempt(attempt)
            if attempt is None:
                break
            os.kill(attempt[moment.rank], signal.SIGKILL)
            kills.append(Kill(moment=moment, taken=len(read_metrics(run_dir))))
            attempt = run.attempt(attempt)
        if code := run.end():
            raise SystemExit(f"the run with kills ended with code {code} after {len(kills)} of them; see {run_dir}.log")
    return kills


def metric_differences(whole: Path, other: Path) -> list[str]:
    """The metrics in which two runs differ, by step and key, without metrics that depend on the machine."""
    rows = [
        [{key: value for key, value in row.items() if not key.startswith(UNEQUAL)} for row in read_metrics(folder)]
        for folder in (whole, other)
    ]
    if len(rows[0]) != len(rows[1]):
        return [f"{len(rows[0])} and {len(rows[1])} steps"]
    return [
        f"step {mine['step']:.0f}: {key}: {mine.get(key)} and {theirs.get(key)}"
        for mine, theirs in zip(*rows, strict=True)
        for key in sorted(mine.keys() | theirs.keys())
        if repr(mine.get(key)) != repr(theirs.get(key))  # compare by repr, so that NaN equals NaN
    ]


def weight_differences(whole: Path, other: Path) -> list[str]:
    """The files of exported weights in which two runs differ."""
    mine, theirs = _exported(whole), _exported(other)
    return [f"weights in {name}" for name in mine if mine[name] != theirs.get(name)]


def _exported(run_dir: Path) -> dict[str, str]:
    """Export the weights of a run; returns the SHA-256 of each file."""
    out = run_dir.parent / f"{run_dir.name}-exported"
    subprocess.run(
        [sys.executable, "-m", "fovea", "export", str(run_dir), "--out", str(out)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(out.glob("*.safetensors"))}
    assert files, f"no weights in {out}"
    return files


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="number of kills")
    parser.add_argument("--processes", type=int, default=1, help="number of processes; more than 1 run under torchrun")
    parser.add_argument("--steps", type=int, default=30, help="number of steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills")
    parser.add_argument("--case", choices=CASES, default="grpo", help="recipe and settings")
    parser.add_argument("--out", type=Path, required=True, help="new folder for both runs")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="additional settings of both runs")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True)
    recipe, *of_case = CASES[options.case]
    reward, whole, other = options.out / "reward.py", options.out / "whole", options.out / "killed"
    reward.write_text(REWARD)
    words = [recipe, *SIZES, *of_case, f"reward={reward}:score", f"max_steps={options.steps}", *options.settings]
    start_seconds = never_killed(words, whole, options.processes)
    planned = moments(
        options.kills,
        seed=options.seed,
        steps=options.steps,
        step_seconds=median(row["seconds/step"] for row in read_metrics(whole)),
        start_seconds=start_seconds,
        ranks=options.processes,
    )
    kills = killed(words, other, planned, options.processes)
    show(_table(kills))
    found = metric_differences(whole, other) + weight_differences(whole, other)
    print(f"{len(kills)} of {options.kills} kills; " + ("equal in metrics and weights" if not found else "NOT equal:"))
    print("\n".join(found[:20]))
    raise SystemExit(bool(found) or len(kills) < options.kills)


def _table(kills: Sequence[Kill]) -> Table:
    rows = []
    for number, kill in enumerate(kills, start=1):
        step = "its start, or in its first step" if kill.moment.step is None else f"step {kill.moment.step}"
        moment = f"{kill.moment.after_seconds:.2f} s after {step}"
        rows.append((str(number), str(kill.moment.rank), str(kill.taken), moment))
    return as_table("kills", ("kill", "rank", "steps taken", "moment"), rows)


if __name__ == "__main__":
    main()
