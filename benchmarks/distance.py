"""Distances in the code that a reader of one GRPO step has to follow.

    python -m benchmarks.distance [--list] [KEY=VALUE]...

The calls of the demo's second step are recorded with few prompts, from rows to metrics.jsonl. A second recording, with
a user's reward function, measures the ways. `--list` also prints what was counted. The exit status is 1 if a name in
this file no longer exists in the code.

- A way connects the function that computes a value with the function that uses it. It goes up from the first to their
  lowest common caller, and down to the second. A change of file is a call between two files; frames are all calls on
  the way, and each file is counted once. Calls of other packages and of event loops are left out.
- Files entered: the files of all packages in which a function runs during the step.
- Needed by a reader: the entered files that needed_files.txt lists. The others are plumbing or depend on the settings.
- Record classes of an answer: classes of fovea with a field in `ANSWER_FIELDS`, except those of the rollout (`LIVE`).
- Declarations of a policy method: classes named ...Policy that define a call of `train.base.CALLS`, except backends,
  which inherit from another such class. The most frequent number and the largest number are printed.
"""

from __future__ import annotations

import ast
import asyncio
import sys
import threading
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from statistics import mode
from tempfile import TemporaryDirectory
from types import CodeType, FrameType

import fovea
import fovea_gym
from fovea.config.loading import load_config
from fovea.config.recipes import shipped_recipe
from fovea.loop import take_step
from fovea.run.context import Run
from fovea.run.lifecycle import begin, closing, record
from fovea.train.base import CALLS
from fovea.wiring.run import build
from fovea_gym.utils.event_loop import wait_for

ROOTS = [Path(str(package.__file__)).parent for package in (fovea, fovea_gym)]
SMALL = """
environment.train_size=16 environment.dev_size=4 environment.test_size=4 max_steps=2 rollout.prompts_per_step=4
rollout.samples_per_prompt=4 warmup=null evaluate.before_training=false evaluate.shared_images=ignore parity.prompts=0
log.tensorboard=false log.progress=false log.samples_every_steps=1
"""
REWARD = "def users_reward(task, text, images):\n    return float(len(text) % 2)"
WAYS = {
    "reward -> advantage": ("users_reward", "grpo"),
    "log-prob -> loss": ("token_scores", "clipped_loss"),
    "weights -> engine, one process": ("Optimizer.step", "EmbeddedEngine.load_weights"),
    "take_step -> clipped_loss": ("take_step", "clipped_loss"),
}
"""For each way, the function that computes a value and the function that uses it."""
ANSWER_FIELDS = {"role", "finish", "answer", "turns"}
LIVE = ("fovea/rollout/", "fovea/types.py")
NEEDED = Path(__file__).with_name("needed_files.txt")
BEGINNINGS: dict[CodeType, str] = {
    threading.Thread.start.__code__: "self",
    asyncio.BaseEventLoop.create_task.__code__: "coro",
    asyncio.run_coroutine_threadsafe.__code__: "coro",
}
"""Functions that start a thread or a coroutine, with the name of the argument that holds it."""
Stack = tuple[tuple[str, str], ...]
"""The calls of a stack, outermost first: file and qualified name of each function."""
Count = tuple[str, list[str]]
"""A number as text, or GONE with the missing name; and a list of what was counted."""


class Recorder:
    """A profiler that traces a thread or a task back to the call that started it, not to the loop that runs it."""

    def __init__(self) -> None:
        self.functions = defaultdict[str, set[str]](set)  # functions that ran, by file
        self.stacks = defaultdict[str, set[Stack]](set)  # by function, only for functions in `WAYS`
        self._begun_by: dict[object, Stack] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code in BEGINNINGS:
            self._begun_by.setdefault(frame.f_locals[BEGINNINGS[code]], self._stack(frame))
        elif event == "call" and (file := _file(code)) is not None:
            self.functions[file].add(code.co_qualname)
            if any(code.co_qualname in ends for ends in WAYS.values()):
                self.stacks[code.co_qualname].add(self._stack(frame))

    def _stack(self, frame: FrameType | None) -> Stack:
        calls: list[tuple[str, str]] = []
        while frame is not None and frame.f_code is not asyncio.Handle._run.__code__:
            if (file := _file(frame.f_code)) is not None:
                calls.append((file, frame.f_code.co_qualname))
            frame = frame.f_back
        task = asyncio.current_task() if asyncio._get_running_loop() else None
        begun = threading.current_thread() if task is None else task.get_coro()
        stack = (*self._begun_by.get(begun, ()), *reversed(calls))
        return stack[next((at for at, (_, name) in enumerate(stack) if name == "take_step"), 0) :]


@cache
def _file(code: CodeType) -> str | None:
    """The short name of a file of our packages or of the user's reward; None for other files."""
    path = Path(code.co_filename)
    roots = [path] if code.co_qualname == "users_reward" else ROOTS
    return next((str(path.relative_to(root.parent)) for root in roots if path.is_relative_to(root)), None)


def recorded_step(*overrides: str) -> Recorder:
    """Record the second step of a small run of the demo; FOLDER in an override becomes the folder of reward.py."""
    recorder = Recorder()

    async def take_two_steps(run: Run) -> None:
        async with closing(run):
            state = await begin(run)
            for _ in range(2):
                recorder.functions.clear()
                recorder.stacks.clear()
                with run.phases("step"):
                    groups, metrics = await take_step(run, state)
                state = await record(run, state, groups, metrics)
            sys.setprofile(None)

    with TemporaryDirectory(prefix="fovea-distance-") as folder:
        (Path(folder) / "reward.py").write_text(REWARD)
        given = [each.replace("FOLDER", folder) for each in overrides]
        config = load_config([shipped_recipe("shapes")], [*SMALL.split(), f"run_dir={folder}/run", *given])
        # start here: a thread that is started before the step also runs during it
        threading.setprofile(recorder)
        sys.setprofile(recorder)
        try:
            wait_for(take_two_steps(build(config)))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return recorder


def way(recorder: Recorder, made: str, used: str) -> Count:
    """The way from one function to another; if they run several times, the way with the fewest file changes."""
    stacks = [[stack for stack in recorder.stacks[end] if stack[0][1] == "take_step"] for end in (made, used)]
    if not all(stacks):
        return f"GONE: {used if stacks[0] else made} does not run within take_step; put its successor into WAYS", []
    ways = []
    for up, down in product(*stacks):
        shared = max(n for n in range(len(up) + 1) if up[:n] == down[:n])
        calls = (*reversed(up[shared - 1 :]), *down[shared:])
        ways.append((sum(one != other for (one, _), (other, _) in pairwise(calls)), len(calls), calls))
    changes, frames, calls = min(ways)
    listed = [f"{file}: {name}" for file, name in calls]
    return f"{changes} changes of file, {len(dict(calls))} files, {frames} frames", listed


def needed(entered: Collection[str]) -> Count:
    """The entered files that a reader needs."""
    files = NEEDED.read_text(encoding="utf-8").split()
    if gone := [each for each in files if not any((root.parent / each).is_file() for root in ROOTS)]:
        return f"GONE: {', '.join(gone)}; put their successors into {NEEDED.name}", []
    found = [each for each in files if each in entered]
    return str(len(found)), found


def declarations() -> tuple[list[str], dict[str, list[str]]]:
    """Find the record classes of an answer, and the classes that define each method of a policy."""
    records, calls = list[str](), {call: list[str]() for call in sorted(CALLS)}
    for path in sorted(ROOTS[0].rglob("*.py")):
        place = str(path.relative_to(ROOTS[0].parent))
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for node in (node for node in nodes if isinstance(node, ast.ClassDef)):
            fields = {ast.unparse(x.target) for x in node.body if isinstance(x, ast.AnnAssign)}
            if fields & ANSWER_FIELDS and not place.startswith(LIVE):
                records.append(f"{place}: {node.name}")
            if node.name.endswith("Policy") and not any(ast.unparse(x).endswith("Policy") for x in node.bases):
                for call in calls.keys() & {getattr(x, "name", "") for x in node.body}:
                    calls[call].append(f"{place}: {node.name}")
    return records, calls


def main(arguments: Sequence[str]) -> int:
    demo = recorded_step(*(each for each in arguments if each != "--list"))
    own = recorded_step("reward=FOLDER/reward.py:users_reward")
    records, calls = declarations()
    numbers = [len(places) for places in calls.values()]
    counts = {name: way(own, *ends) for name, ends in WAYS.items()} | {
        "files entered": (str(len(demo.functions)), sorted(demo.functions)),
        "of these needed by a reader": needed(demo.functions),
        "record classes of an answer": (str(len(records) or "GONE: no class has one of ANSWER_FIELDS"), records),
        "declarations of a policy method": (
            f"{mode(numbers)}, at most {max(numbers)}" if all(numbers) else "GONE: no class ...Policy has all of CALLS",
            [f"{call}: {', '.join(places)}" for call, places in calls.items()],
        ),
    }
    for name, (number, listed) in counts.items():
        print(f"{name:33}{number}", *(f"    {each}" for each in listed if "--list" in arguments), sep="\n")
    return int(any(number.startswith("GONE") for number, _ in counts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
