"""The files of fovea/ that one GRPO step enters: those in which a function runs between two versions of the policy.

    python -m benchmarks.step_files [KEY=VALUE]...

It takes two steps of the demo with few prompts, and profiles the second one, from rows to its line of metrics.jsonl.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import fovea
from fovea.config.loading import load_config
from fovea.config.recipes import shipped_recipe
from fovea.loop import take_step
from fovea.run.context import Run
from fovea.run.lifecycle import begin, closing, record
from fovea.wiring.run import build
from fovea_gym.utils.event_loop import wait_for

ROOT = Path(fovea.__file__).parent
SMALL = (
    *("environment.train_size=16", "environment.dev_size=4", "environment.test_size=4"),
    *("warmup=null", "evaluate.before_training=false", "evaluate.shared_images=ignore", "parity.prompts=0"),
    *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "max_steps=2"),
    *("log.tensorboard=false", "log.progress=false", "log.samples_every_steps=1"),
)


def files_of_a_step(overrides: Sequence[str] = ()) -> dict[str, set[str]]:
    """The functions that the second step of a small run enters, by file."""
    with TemporaryDirectory(prefix="fovea-step-files-") as folder:
        config = load_config([shipped_recipe("shapes")], [*SMALL, f"run_dir={folder}/run", *overrides])
        return wait_for(_second_step(build(config)))


async def _second_step(run: Run) -> dict[str, set[str]]:
    """Names of the functions that ran in the second step, by file below fovea/."""
    functions = defaultdict[str, set[str]](set)

    def entered(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            functions[str(Path(code.co_filename).relative_to(ROOT.parent))].add(code.co_qualname)

    async with closing(run):
        state = await begin(run)
        for profiler in (None, entered):
            threading.setprofile(profiler)
            sys.setprofile(profiler)
            try:
                with run.phases("step"):
                    groups, metrics = await take_step(run, state)
                state = await record(run, state, groups, metrics)
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
    return dict(functions)


if __name__ == "__main__":
    found = files_of_a_step(sys.argv[1:])
    for file, functions in sorted(found.items()):
        print(f"{len(functions):4} {file}")
    print(f"{len(found)} files")
