"""Compares `fovea plan` with measured memory peaks, for recipes with tiny and medium models on this CPU.

    python -m benchmarks.plan_check --json plan_check.json

Every case is a run of three steps in a separate process. The measured value is the peak of torch's allocations
(`torch_memory`) in each phase of the last step, when the optimizer has its state and no checkpoint is being written.
The planned value is that of `fovea plan` for the same recipe and the run's lengths.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.table import Table

from benchmarks.printing import as_table, show
from benchmarks.process import last_line
from benchmarks.torch_memory import AllocationTrace
from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.loop import train
from fovea.run.context import Run
from fovea.wiring.model import MODEL_FOLDER
from fovea.wiring.run import build
from fovea_tools.plan.plan import make_plan

MODULE = "benchmarks.plan_check"
MIB = 2**20
PHASES = ("rollout", "update")
STEPS = 3
ROWS = 100
"""Number of training rows in which the longest prompt is searched."""
RECIPES = Path(__file__).parents[1] / "recipes"
REWARD = "import zlib\n\ndef score(task, text, images):\n    return zlib.crc32(text.encode()) % 7\n"
"""A reward that differs between answers of random weights: groups with equal rewards are not trained on."""
COMMON = (
    *("warmup=null", f"max_steps={STEPS}", "parity.prompts=0", "log.tensorboard=false", "log.progress=false"),
    *("checkpoint.every_steps=0", "evaluate.before_training=false", "evaluate.image_controls=false"),
    *("evaluate.every_steps=0", "environment.train_size=200", "environment.dev_size=8", "environment.test_size=8"),
)
MID = (
    "model.tiny={hidden_size: 512, num_layers: 6, num_heads: 8, num_kv_heads: 4, "
    "intermediate_size: 1536, vocabulary_size: 4096}"
)
CASES: dict[str, tuple[str, ...]] = {
    "tiny, GRPO, trained tower": ("shapes.yaml",),
    "tiny Qwen2.5-VL, PPO, own critic, KL": (
        "shapes_ppo.yaml",
        "model.tiny={family: qwen2_5_vl, num_heads: 2, num_kv_heads: 2}",
        "algorithm.advantage.critic.trunk=separate",
        "algorithm.kl={coef: 0.05}",
        "rollout.prompts_per_step=80",
    ),
    "mid, GRPO, several micro-batches": (
        "shapes.yaml",
        MID,
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=4",
        "rollout.max_new_tokens=32",
        "rollout.engine.reuse_gib=0",
        "train.max_tokens_per_microbatch=512",
    ),
    "mid, LoRA, frozen tower, checkpointing": (
        "shapes.yaml",
        MID,
        "model.lora={rank: 16}",
        "rollout.prompts_per_step=16",
        "rollout.samples_per_prompt=8",
        "rollout.max_new_tokens=48",
        "train.gradient_checkpointing=full",
    ),
    "mid, frozen tower, recorded outputs": (
        "shapes.yaml",
        MID,
        "model.freeze_vision_tower=true",
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=8",
        "rollout.max_new_tokens=48",
        # equal to what a step records, since the tape reserves this memory at once
        "rollout.engine.reuse_gib=0.377",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Planned and measured memory of one phase of a case, in MiB."""

    case: str
    phase: str
    planned: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.planned / self.measured


def measure(case: str) -> list[Row]:
    """Run a case in this process and compare its peaks with the plan."""
    recipe, *overrides = CASES[case]
    with TemporaryDirectory(prefix="fovea-plan-") as folder:
        reward = Path(folder, "reward.py")
        reward.write_text(REWARD)
        places = [f"run_dir={folder}/run", f"reward={reward}:score"]
        config = load_config([RECIPES / recipe], [*COMMON, *places, *overrides])
        run = build(config)
        config = _with_lengths(run)
        trace = AllocationTrace()
        train(replace(run, profile=partial(_last_two_steps, trace)))
        peaks = trace.peaks(PHASES)
        plan = make_plan(config)
    return [
        Row(case=case, phase=phase.phase, planned=phase.total / MIB, measured=peaks[phase.phase][-1] / MIB)
        for phase in plan.phases
    ]


@contextmanager
def _last_two_steps(trace: AllocationTrace, step: int) -> Iterator[None]:
    """Trace from the second step, counted from 0, to the end of the third."""
    if step == STEPS - 2:
        for thread in threading.enumerate():
            # wait for the thread that writes a checkpoint, which frees its copies
            if thread.name == "checkpoint":
                thread.join()
        trace.start()
    yield
    if step == STEPS - 1:
        trace.stop()


def _with_lengths(run: Run) -> Config:
    """The settings of a run, with the plan's lengths taken from the longest of its first prompts."""
    config, train_rows = run.config, run.sources.train
    prompts = [found.prompt for index in range(ROWS) if (found := train_rows.get(index)) is not None]
    longest = max(prompts, key=lambda prompt: prompt.num_tokens)
    lengths = {
        "prompt_tokens": longest.num_tokens,
        "images_per_prompt": len(longest.images),
        "image_tokens": longest.images[0].num_tokens,
        "distinct_images": config.max_steps * config.rollout.prompts_per_step,
    }
    return as_planned(run, lengths | {"gpus": 1})


def as_planned(run: Run, plan: Mapping[str, object]) -> Config:
    """The settings of a run for `fovea plan` on a CPU, with the run's model and the given `plan` section."""
    made = {"path": str(run.folder / MODEL_FOLDER), "tiny": None}
    sections = {
        "plan": run.config.plan.model_copy(update={"gpu": "cpu", **plan}),
        "model": run.config.model.model_copy(update=made),
    }
    return run.config.model_copy(update=sections)


def table(rows: Sequence[Row]) -> Table:
    """Table of the planned and measured peaks of all cases."""
    cells = ((row.case, row.phase, f"{row.planned:,.1f}", f"{row.measured:,.1f}", f"{row.ratio:.3f}") for row in rows)
    headers = ("case", "phase", "planned", "measured", "ratio")
    return as_table("peak of torch's allocations, MiB", headers, cells, num_left=2)


def main() -> None:
    """Measure all cases and print the table; with --case, measure one and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="run one case in this process and print JSON")
    parser.add_argument("--json", type=Path, help="also write the table as JSON")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps([asdict(row) for row in measure(arguments.case)]))
        return
    # each case runs in a separate process with fresh memory
    rows = [Row(**values) for case in CASES for values in last_line(MODULE, "--case", case)]
    show(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
