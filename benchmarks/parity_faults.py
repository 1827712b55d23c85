"""Injects known faults into the engine of a tiny model, and prints the parity gate's verdict on each.

    python -m benchmarks.parity_faults                      # families x dtypes x (random weights, warmed up)
    python -m benchmarks.parity_faults --sound-runs 200 --minutes 30     # count the sound runs that the gate stops

The faults are injected into the engine's inputs, without using the gate's own functions. A verdict is `named` (the run
stops, and the error names this fault), `stopped` (the error names another fault or none), `cannot tell` (the run
passes, and the gate reports that this fault would not show) or `PASSED`. Stale weights are measured by a parity check
of version 1 while the engine still has the weights of version 0.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from fovea.config.run import Config
from fovea.models.families.qwen_vl import QwenVL
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.run.context import Run
from fovea.run.parity import read_parity, read_synced_parity
from fovea.run.parity_result import ParityResult
from fovea.train.base import SftExample
from fovea.train.local import LocalPolicy
from fovea.types import Completion, Prompt, PromptImage, Request
from fovea.wiring.run import build
from fovea_gym.examples.shapes_zoom import ShapesZoom, ShapesZoomEnvironment
from fovea_gym.types import Message, Task, Turn
from fovea_gym.utils.event_loop import wait_for

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
DTYPES = ("float32", "bfloat16")
STALE = "the weights of version 0"
WARMUP_STEPS = 250
ROWS_PER_STEP = 16
SHOWN_RUNS = 10
"""Number of sound runs between two printed lines."""

Pixels: TypeAlias = NDArray[np.float32]
Positions: TypeAlias = tuple[NDArray[np.int64], int]


class SecondLook(ShapesZoom):
    """Scenes of two turns: the reply to any first answer is the first quarter of the picture."""

    def reply(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message] | None:
        return super().reply(task, [Turn(messages=(), text=r"\crop{1}")])


def tiny_run(folder: str, family: str, dtype: str, seed: int = 0) -> Run:
    """Make a run of a tiny model on scenes of two turns."""
    config = Config.model_validate(
        {
            "model": {"tiny": {"family": family}, "dtype": dtype},
            "environment": {"name": "shapes_zoom", "train_size": 600, "dev_size": 4, "test_size": 4},
            "rollout": {"max_new_tokens": 12},
            "warmup": {"max_steps": 1, "learning_rate": 3e-3, "lr_warmup_steps": 0},
            "log": {"tensorboard": False, "progress": False},
            "run_dir": folder,
            "seed": seed,
        }
    )
    run = build(config, SecondLook(ShapesZoomEnvironment(train_size=600, dev_size=4, test_size=4), seed))
    wait_for(run.weight_sync.sync(0))
    return run


def warm_up(run: Run, steps: int) -> None:
    """Take supervised steps on the targets of the first turn."""
    assert run.warmup is not None
    source = run.sources.train
    for step in range(steps):
        first = step * ROWS_PER_STEP % (len(source) - ROWS_PER_STEP)
        tasks = [source.tasks[index] for index in range(first, first + ROWS_PER_STEP)]
        prompts = [source.render(task).prompt for task in tasks]
        pairs = [
            SftExample(prompt=prompt, answer_ids=run.warmup.answer_ids(prompt, run.environment.target(task), task.id))
            for task, prompt in zip(tasks, prompts, strict=True)
        ]
        wait_for(run.policy.sft(pairs))


class BrokenEngine:
    """An engine that changes the prompts it is given, and reads each from its beginning in every turn."""

    def __init__(self, engine: Any, change: Callable[[Prompt, bool], Prompt]) -> None:
        """`change` gets a prompt, and True if it is the prompt of a later turn."""
        self._engine = engine
        self._change = change
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: Request) -> Sequence[Completion]:
        prompt = self._change(request.prompt, request.continues is not None)
        self.calls += 1
        try:
            completions: Sequence[Completion] = await self._engine.generate(
                replace(request, prompt=prompt, keep=False, continues=None)
            )
        finally:
            self.calls -= 1
        return completions


def _pixels(change: Callable[[Pixels], Pixels]) -> Callable[[Prompt, bool], Prompt]:
    def of_image(image: PromptImage) -> PromptImage:
        pixels = change(np.asarray(image.tensors["pixel_values"], dtype=np.float32))
        return replace(image, key=f"{image.key}-broken", tensors={**image.tensors, "pixel_values": pixels})

    return lambda prompt, _: replace(prompt, images=tuple(map(of_image, prompt.images)))


def _half_size(pixels: Pixels) -> Pixels:
    """Replace each 2 x 2 pixels by their mean. Qwen's patches are squares of 3 colours and 2 frames."""
    side = math.isqrt(pixels.shape[-1] // 6)
    x = pixels.reshape(len(pixels), 6, side // 2, 2, side // 2, 2).mean(axis=(3, 5))
    halved: Pixels = x.repeat(2, axis=2).repeat(2, axis=3).reshape(pixels.shape)
    return halved


def _of_others() -> Callable[[Prompt, bool], Prompt]:
    """Replace each picture by that of the previous request, as a cache with wrong keys would; the first stays."""
    last: dict[int, PromptImage] = {}
    other: dict[str, PromptImage] = {}

    def change(prompt: Prompt, _: bool) -> Prompt:
        for place, image in enumerate(prompt.images):
            other.setdefault(image.key, last.get(place, image))
            last[place] = image
        return replace(prompt, images=tuple(other[image.key] for image in prompt.images))

    return change


def _without(prompt: Prompt, number: int, pad: int) -> Prompt:
    """The prompt without one of its images and that image's tokens."""
    pads = np.flatnonzero(prompt.token_ids_L == pad)
    ends = np.cumsum([image.num_tokens for image in prompt.images])
    gone = pads[ends[number] - prompt.images[number].num_tokens : ends[number]]
    images = tuple(image for index, image in enumerate(prompt.images) if index != number % len(ends))
    return replace(prompt, token_ids_L=np.delete(prompt.token_ids_L, gone), images=images)


def _doubled(prompt: Prompt, pad: int) -> Prompt:
    """The prompt with each block of image tokens doubled, without separators between the two."""
    ids_L, images = prompt.token_ids_L, (image for image in prompt.images for _ in range(2))
    return replace(prompt, token_ids_L=np.repeat(ids_L, np.where(ids_L == pad, 2, 1)), images=tuple(images))


def _rows_dropped(own: Callable[..., Positions], *call: Any) -> Positions:
    """Use the temporal row for all three axes, as SGLang's kernel once did (slime#2336)."""
    positions_3L, following = own(*call)
    return positions_3L[:1].repeat(3, axis=0), following


def _one_by_one(own: Callable[..., Positions], family: QwenVL, ids: NDArray[np.int64], *call: Any) -> Positions:
    return own(family, ids, (), call[-1])


CHANGES: dict[str, Callable[[int], Callable[[Prompt, bool], Prompt]]] = {
    "grey images": lambda _: _pixels(np.zeros_like),
    "images of other prompts": lambda _: _of_others(),
    "images normalised twice": lambda _: _pixels(lambda pixels: (pixels - np.float32(0.5)) / np.float32(0.5)),
    "images of half the resolution": lambda _: _pixels(_half_size),
    "image tokens doubled": lambda pad: lambda prompt, _: _doubled(prompt, pad),
    # the prompts of first turns have one picture
    "the last image missing": lambda pad: lambda prompt, _: _without(prompt, 0, pad) if prompt.images else prompt,
    "a later turn's image missing": lambda pad: lambda prompt, later: _without(prompt, -1, pad) if later else prompt,
}
"""For each fault, a function that returns the change of a prompt, given the id of image tokens."""
POSITIONS = {"two of three M-RoPE rows dropped": _rows_dropped, "1-D positions": _one_by_one}
FAULTS = (*CHANGES, *POSITIONS, STALE)


@contextmanager
def broken_positions(engine: BrokenEngine, wrong: Callable[..., Positions]) -> Iterator[None]:
    """Let the engine compute wrong positions in the context; the trainer's positions stay right."""
    own = QwenVL.positions

    def positions(*call: Any) -> Positions:
        return wrong(own, *call) if engine.calls else own(*call)

    with patch.object(QwenVL, "positions", positions):
        yield


def read_with(run: Run, fault: str) -> ParityResult:
    """Run the parity gate on an engine with this fault; for stale weights, the policy is first trained for a step."""
    if fault == STALE:
        return _read_stale(run)
    change = CHANGES[fault](run.image_token_id) if fault in CHANGES else lambda prompt, _: prompt
    engine = BrokenEngine(run.engine, change)
    wrong = POSITIONS.get(fault)
    with broken_positions(engine, wrong) if wrong else nullcontext():
        return wait_for(read_parity(replace(run, engine=engine), 0))


def _read_stale(run: Run) -> ParityResult:
    assert isinstance(run.policy, LocalPolicy)
    assert isinstance(run.engine, EmbeddedEngine)
    # copy the weights, so that training does not change them
    copies = {weight.name: weight.tensor().clone() for weight in run.policy.trained.weights_to_sync()}
    run.engine.load_weights(copies, 0)
    wait_for(read_parity(run, 0))
    warm_up(run, 1)
    reading = wait_for(read_synced_parity(run, 1))
    wait_for(run.weight_sync.sync(1))
    return reading


def answer(reading: ParityResult, fault: str) -> str:
    """The gate's verdict on an engine with this fault."""
    doubtful = [each.name for each in reading.doubtful]
    if reading.passed:
        return "cannot tell" if fault in doubtful else "PASSED"
    return "named" if fault in doubtful[:1] else f"stopped ({', '.join(doubtful[:1]) or 'none'})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity_faults", description=__doc__.split("\n")[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--warmup-steps", type=int, default=WARMUP_STEPS, help="supervised steps before the second row")
    parser.add_argument(
        "--sound-runs", type=int, default=0, help="number of sound runs to check instead of printing the table"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="do not begin a sound run after this time")
    options = parser.parse_args(arguments)
    if options.sound_runs:
        print_sound(options.sound_runs, options.families, options.dtypes, options.minutes)
        return
    print("| family | dtype | weights | sound: images, text | " + " | ".join(FAULTS) + " |", flush=True)
    print("|---" * (4 + len(FAULTS)) + "|", flush=True)
    for family, dtype in itertools.product(options.families, options.dtypes):
        for row in rows_of(family, dtype, options.warmup_steps):
            print(row, flush=True)


def rows_of(family: str, dtype: str, warmup_steps: int) -> Iterator[str]:
    """Yield two rows of the table: a tiny model with random weights, and the same after a warm-up."""
    for state, steps in (("random", 0), ("warmed up", warmup_steps)):
        with TemporaryDirectory() as folder:
            run = tiny_run(folder, family, dtype)
            warm_up(run, steps)
            wait_for(run.weight_sync.sync(0))
            sound = wait_for(read_parity(run, 0))
            gaps = ", ".join(f"{kind.mean_abs:.1e}" for kind in sound.kinds)
            broken = {fault: read_with(run, fault) for fault in FAULTS}
            cells = [
                f"{answer(reading, fault)} {max(kind.mean_abs for kind in reading.kinds):.2g}"
                for fault, reading in broken.items()
            ]
            verdict = "" if sound.passed else " STOPPED"
            yield f"| {family} | {dtype} | {state} | {gaps}{verdict} | " + " | ".join(cells) + " |"


def print_sound(count: int, families: Sequence[str], dtypes: Sequence[str], minutes: float) -> None:
    """Print how many sound runs the gate stops, after every SHOWN_RUNS runs and at the end or after `minutes`."""
    ends = time.monotonic() + 60 * minutes
    stopped, largest = 0, dict.fromkeys(dtypes, 0.0)
    cases = itertools.islice(itertools.cycle(itertools.product(families, dtypes, (0, 20))), count)
    for seed, (family, dtype, steps) in enumerate(cases):
        gate, synced = read_sound(family, dtype, seed, steps)
        stopped += not (gate.passed and synced.passed)
        largest[dtype] = max(largest[dtype], gate.worst.mean_abs)
        num_read, is_last = seed + 1, seed + 1 == count or time.monotonic() >= ends
        if is_last or num_read % SHOWN_RUNS == 0:
            print(f"{stopped} of {num_read} sound runs stopped; largest mean difference: {largest}", flush=True)
        if is_last:
            break


def read_sound(family: str, dtype: str, seed: int, warmup_steps: int) -> tuple[ParityResult, ParityResult]:
    """The gate's results for a sound run: before RL, and after a further supervised step and its weight sync."""
    with TemporaryDirectory() as folder:
        run = tiny_run(folder, family, dtype, seed)
        warm_up(run, warmup_steps)
        wait_for(run.weight_sync.sync(0))
        gate = wait_for(read_parity(run, 0))
        warm_up(run, 1)
        wait_for(run.weight_sync.sync(1))
        return gate, wait_for(read_synced_parity(run, 1))


if __name__ == "__main__":
    main()
