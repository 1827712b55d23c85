"""Bytes sent and driver time of a step by number of workers, and of the messages with a large batch.

    python -m benchmarks.scaling --json scaling.json

Runs: `recipes/shapes.yaml` on 1, 2 and 4 Ray workers on this machine. The driver of each run is a separate process
without a worker, so its CPU time is the cost of a step for the driver. Figures are medians over the counted steps.
Messages: a batch of synthetic samples is assigned to several learners and packed for each, as for a call of the policy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time, thread_time
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.plan_check import COMMON, RECIPES, REWARD
from benchmarks.printing import as_table, show
from benchmarks.process import last_line
from fovea.cluster.services import WorkersPolicy
from fovea.config.loading import load_config
from fovea.config.sections import Train
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.models.flops import Work, training_passes
from fovea.processes.messages import Packing, Share, SharedArguments
from fovea.run.context import Run
from fovea.train.row_assignment import Cost, ImageKeys, RowAssignment
from fovea.types import Batch, Prompt, PromptImage, Sample, SampleGroup
from fovea.wiring.run import build

MODULE = "benchmarks.scaling"
MIB = 2**20
WARM_STEPS = 2
"""Number of first steps that are not counted: the first weight sync sends all weights."""
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "1": (1, ()),
    "2": (2, ()),
    "4": (4, ()),
    "1 + 1": (2, ("cluster.placement=disaggregated", "cluster.rollout_gpus=1")),
    "2 + 2": (4, ("cluster.placement=disaggregated", "cluster.rollout_gpus=2")),
}
"""Number of workers, and settings; in `n + m`, n workers train and m generate."""
SAMPLES, TOKENS, PROMPT_TOKENS = 16, 1024, 512
IMAGE_SIDE, PATCH_VALUES = 16, 1536
IMAGE_PATCHES = IMAGE_SIDE**2
"""An image of 256 x 256 pixels in patches of 16 x 16 and two frames: 1.5 MiB of float32 pixels."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    if options.case:
        print(json.dumps(measure(options.case, options.steps)))
        return
    found: dict[str, Any] = {"messages": [message(groups, 4) for groups in options.groups]}
    found["runs"] = {case: _in_process_of_its_own(case, options.steps) for case in options.cases}
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    show(_table("a step of each run", "workers", found["runs"]))
    show(_table("a call with a batch, for 4 learners", "groups", {m["groups"]: m for m in found["messages"]}))


def measure(case: str, steps: int) -> dict[str, float]:
    """Run a case with this process as the driver; returns medians over its steps, with sizes in MiB."""
    workers, settings = CASES[case]
    with TemporaryDirectory(prefix="fovea-") as folder:
        Path(folder, "reward.py").write_text(REWARD)
        places = [f"run_dir={folder}/run", f"reward={folder}/reward.py:score", f"cluster.gpus_per_node={workers}"]
        wanted = [*COMMON, *places, *settings, "model.device=cpu", f"max_steps={steps + WARM_STEPS}"]
        run = build(load_config([RECIPES / "shapes.yaml"], wanted))
        driver = _Driver(run)
        train(replace(run, profile=driver.step))
        rows = read_metrics(Path(folder) / "run")[WARM_STEPS:]
    images = median(row["transfer/images_mib"] for row in rows)
    return {
        "weights": median(row["transfer/weights_mib"] for row in rows),
        "images": images,
        "messages": median(driver.sent[WARM_STEPS:]) / MIB - images,
        "driver, CPU seconds": median(driver.seconds[WARM_STEPS:]),
        "step, seconds": median(row["seconds/step"] for row in rows),
    }


class _Driver:
    """Records the CPU seconds of the driver's process and the bytes that it sent, for each step."""

    def __init__(self, run: Run) -> None:
        assert isinstance(run.policy, WorkersPolicy), "a run in one process does not send anything"
        self._workers = run.policy.workers
        self.seconds: list[float] = []
        self.sent: list[int] = []

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        seconds, sent = process_time(), self._workers.sent_bytes
        yield
        self.seconds.append(process_time() - seconds)
        self.sent.append(self._workers.sent_bytes - sent)


def message(groups: int, learners: int) -> dict[str, float]:
    """Sizes in MiB and CPU seconds of packing for two calls with the same batch; the first also sends its images."""
    made_up = batch(groups)
    started = thread_time()
    assignment = _assignment(learners)
    images = assignment.images_of_ranks(made_up.groups, assignment.train.max_tokens_per_microbatch)
    dealt = thread_time() - started
    learner_ends = [_End(packing=Packing(), images=keys) for keys in images]
    first = _pack(learner_ends, made_up)
    packing = learner_ends[0].packing
    with_images = packing.packed_bytes
    once = _pack(learner_ends[:1], made_up)
    return {
        "groups": groups,
        "images": sum(end.packing.image_bytes for end in learner_ends) / MIB,
        "images of a learner": max(end.packing.image_bytes for end in learner_ends) / MIB,
        "message": (packing.packed_bytes - with_images) / MIB,
        "deal": dealt,
        "one learner": once,
        f"{learners} learners": _pack(learner_ends, made_up),
        f"{learners} learners, each by itself": sum(_pack([end], made_up) for end in learner_ends),
        f"{learners} learners, with images": first,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """The driver's side of the connection to a learner."""

    packing: Packing
    images: ImageKeys
    """Keys of the images in the learner's rows."""


def _assignment(learners: int) -> RowAssignment:
    """The assignment of rows for a model of about 7 billion parameters."""
    # rounded FLOPs of Qwen2.5-VL-7B
    work = Work(token=1.3e10, pair=4e5, action=1.1e9, patch=1.3e9, image_pair=2e4, window_pair=1.4e5, window_side=8)
    passes = training_passes(lora=False, trains_vision=False, features_cached=True)
    train = Train(max_tokens_per_microbatch=32768)
    return RowAssignment(
        train=train, cost=Cost(work=work, passes=passes), num_ranks=learners, image_token_id=0, shards_tower=False
    )


def _pack(ends: Sequence[_End], made_up: Batch) -> float:
    started = thread_time()
    arguments = SharedArguments([made_up])
    for number, end in enumerate(ends):
        end.packing.pack((number, Share(arguments, end.images)))
    return thread_time() - started


def batch(groups: int) -> Batch:
    """Make groups of `SAMPLES` completions of `TOKENS` tokens with advantages; each group has a separate image."""
    return Batch(groups=tuple(_group(number) for number in range(groups)))


def _group(number: int) -> SampleGroup:
    pixels = np.zeros((IMAGE_PATCHES, PATCH_VALUES), np.float32)
    image = PromptImage(
        key=f"{number:064}",
        tensors={"pixel_values": pixels},
        num_tokens=IMAGE_PATCHES // 4,
        grid=(1, IMAGE_SIDE, IMAGE_SIDE),
    )
    prompt = Prompt(
        token_ids_L=np.zeros(PROMPT_TOKENS, np.int64),
        unexpanded_ids_U=np.zeros(PROMPT_TOKENS - image.num_tokens + 1, np.int64),
        images=(image,),
    )
    samples = tuple(_sample(f"{number}/{place}", place) for place in range(SAMPLES))
    return SampleGroup(prompt=prompt, samples=samples, task_id=str(number))


def _sample(completion_id: str, token_id: int) -> Sample:
    return Sample(
        token_ids_T=np.full(TOKENS, token_id),
        mask_T=np.ones(TOKENS, np.bool_),
        rollout_logprobs_T=np.zeros(TOKENS, np.float32),
        advantages_T=np.zeros(TOKENS, np.float32),
        reward=1.0,
        weight=1.0,
        completion_ids=(completion_id,),
        versions=(0,),
    )


def _in_process_of_its_own(case: str, steps: int) -> dict[str, float]:
    with TemporaryDirectory(prefix="fv") as folder:
        # a separate cluster and token, so that other clusters on this machine do not interfere
        own = {"RAY_TMPDIR": folder, "RAY_AUTH_TOKEN_PATH": f"{folder}/token", "OMP_NUM_THREADS": "1"}
        figures: dict[str, float] = last_line(MODULE, "--case", case, "--steps", str(steps), **own)
        return figures


def _table(title: str, first: str, rows: dict[Any, dict[str, float]]) -> Table:
    names = list(dict.fromkeys(name for row in rows.values() for name in row if name != first))
    cells = ([str(key), *(f"{row[name]:.4g}" if name in row else "-" for name in names)] for key, row in rows.items())
    return as_table(title, [first, *names], cells)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=6, help="number of counted steps of each run")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), help="runs, by number of workers")
    parser.add_argument(
        "--groups", type=int, nargs="*", default=[8, 64, 256], help="numbers of groups of the synthetic batch"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures to FILE")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
