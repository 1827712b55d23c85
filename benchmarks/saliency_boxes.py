"""Do occlusion maps highlight the object of a question? Compares IoU of map and object's box with that of chance.

    fovea train shapes run_dir=runs/shapes
    python -m benchmarks.saliency_boxes runs/shapes --scenes 200

It uses held-out scenes whose question is about exactly one object: its colour, its shape, its presence (the answer is
yes) or its number (the answer is one). A map selects the patches with the largest falls in log-prob, as many as have
the area of the box; a free threshold could make a map look better than it is. Chance selects the same number of patches
at random, or by the map of the next scene. `best` selects those that cover the box most: it is below 1 because boxes do
not follow the grid of patches.

Axes: `Y`, `X` pixels; `N` patches; `S` scenes.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from fovea.commands.targets import CheckpointTarget, find_checkpoint, parse_target
from fovea.evaluation.statistics import NUM_RESAMPLES
from fovea_gym.environments.base import Split
from fovea_gym.environments.hash_splits import row_generator
from fovea_gym.environments.shapes.environment import grade
from fovea_gym.environments.shapes.questions import KINDS, scene
from fovea_gym.environments.shapes.scenes import UNIT_SIDE, box_of, free_spots, grid_spots, paint
from fovea_gym.settings.environments import ShapesEnvironment
from fovea_gym.types import Task
from fovea_tools.saliency.occluder import Asked, Occluder, Saliency, Wanted

SPLIT: Split = "test"
DRAWS = 200
"""Number of random selections of patches per scene."""
NOISE = 6.0
"""Largest mean distance between a picture and its scene drawn again, in 0..255: noise gives 2.4, other scenes 20."""
Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A scene with the occlusion map of the model's answer."""

    kind: str
    is_right: bool
    logprob: float
    most: float
    """The largest fall in log-prob of all patches."""
    falls_N: NDArray[np.float32]
    patches_NYX: NDArray[np.bool_]
    box_YX: NDArray[np.bool_]

    @property
    def number(self) -> int:
        """Number of patches that together have the area of the box."""
        return max(1, round(float(self.box_YX.sum() / self.patches_NYX[0].sum())))

    def iou(self, chosen: NDArray[np.int64]) -> float:
        lit_YX = self.patches_NYX[chosen].any(0)
        return float((lit_YX & self.box_YX).sum() / (lit_YX | self.box_YX).sum())


def asked_box(task: Task, row: int, settings: ShapesEnvironment) -> Box | None:
    """The box, in pixels, of the one object that a question is about; None for other questions.

    The row's scene is generated again in the same way as by `Shapes`.
    """
    rng = row_generator(0, SPLIT, row)
    turn, level = divmod(row // len(KINDS), len(settings.levels))
    seen = scene(KINDS[row % len(KINDS)], turn, settings.levels[level], rng)
    assert (seen.question, seen.answer) == (task.question, task.answer), f"{task.id} has another scene"
    spots = (free_spots if settings.levels[level] == 3 else grid_spots)(len(seen.things), rng)
    pixels_YXC = task.images[0].source
    assert isinstance(pixels_YXC, np.ndarray), "scenes are generated, not read from files"
    distance = np.abs(paint(seen.things, spots, len(pixels_YXC), rng) - pixels_YXC).mean()
    assert distance < NOISE, f"{task.id}: the scene drawn again differs by {distance} from its picture"
    if task.kind in ("counting", "existence") and task.answer not in ("1", "yes"):
        return None
    scale = len(pixels_YXC) / UNIT_SIDE
    left, top, right, bottom = box_of(seen.things[0], spots[0])
    return left * scale, top * scale, right * scale, bottom * scale


def seen(found: Saliency, task: Task, box: Box) -> Seen:
    """The scene of a map, with masks of the patches and of the box."""
    (width, height), side = found.numbers.size, found.numbers.patch_px
    y_Y1, x_1X = np.arange(height)[:, None] + 0.5, np.arange(width)[None] + 0.5
    left, top, right, bottom = box
    rows, columns = found.map.falls_RC.shape
    patch_YX = np.arange(height)[:, None] // side * columns + np.arange(width)[None] // side
    return Seen(
        kind=task.kind,
        is_right=grade(found.numbers.answer, task.answer).score == 1,
        logprob=found.numbers.logprob,
        most=float(found.map.falls_RC.max()),
        falls_N=found.map.falls_RC.ravel(),
        patches_NYX=np.arange(rows * columns)[:, None, None] == patch_YX,
        box_YX=(left <= x_1X) & (x_1X < right) & (top <= y_Y1) & (y_Y1 < bottom),
    )


def of_map(one: Seen, falls_N: NDArray[np.float32]) -> float:
    """IoU of the patches with the largest falls in log-prob."""
    return one.iou(np.argsort(-falls_N, kind="stable")[: one.number])


def of_chance(one: Seen, rng: np.random.Generator) -> float:
    """Mean IoU of the same number of random patches."""
    total = len(one.falls_N)
    return float(np.mean([one.iou(rng.choice(total, one.number, replace=False)) for _ in range(DRAWS)]))


def of_best(one: Seen) -> float:
    """IoU of the patches that cover the most of the box."""
    return one.iou(np.argsort(-(one.patches_NYX & one.box_YX).sum((1, 2)), kind="stable")[: one.number])


def ratio(first_S: NDArray[np.float64], second_S: NDArray[np.float64]) -> tuple[float, float, float]:
    """The ratio of two means over the same scenes, with the ends of its 95 % bootstrap interval."""
    picks = np.random.default_rng(0).integers(len(first_S), size=(NUM_RESAMPLES, len(first_S)))
    with np.errstate(divide="ignore"):  # with few scenes, all maps of next scenes may miss the box
        low, high = np.quantile(first_S[picks].mean(1) / second_S[picks].mean(1), (0.025, 0.975), method="nearest")
        return float(first_S.mean() / second_S.mean()), float(low), float(high)


def table_of(scenes: Sequence[Seen], title: str) -> Table:
    """A table with a line for each question type and one for all scenes."""
    rng = np.random.default_rng(0)
    after = [*scenes[1:], scenes[0]]
    columns: dict[str, Callable[[int], float]] = {
        "IoU": lambda place: of_map(scenes[place], scenes[place].falls_N),
        "random": lambda place: of_chance(scenes[place], rng),
        "next": lambda place: of_map(scenes[place], after[place].falls_N),
        "best": lambda place: of_best(scenes[place]),
    }
    values = {name: np.array(list(map(column, range(len(scenes))))) for name, column in columns.items()}
    places = defaultdict[str, list[int]](list)
    for place, one in enumerate(scenes):
        places[one.kind].append(place)
    table = Table(title=title, title_justify="left")
    for name in ("question", "scenes", "right", "fall", "IoU", "random", "next map", "best", "/ random", "/ next map"):
        table.add_column(name, justify="right")
    for kind, of_kind in [*places.items(), ("all", list(range(len(scenes))))]:
        own, random, other, best = (values[name][of_kind] for name in columns)
        right = np.mean([scenes[place].is_right for place in of_kind])
        falls = float(np.median([scenes[place].most for place in of_kind]))
        ratios = ("{:.1f} [{:.1f}, {:.1f}]".format(*ratio(own, chance)) for chance in (random, other))
        means = (f"{each.mean():.3f}" for each in (own, random, other, best))
        table.add_row(kind, str(len(of_kind)), f"{100 * right:.0f} %", f"{falls:.2g}", *means, *ratios)
    return table


def maps_of(target: CheckpointTarget, number: int, hidden: Wanted, overrides: Sequence[str]) -> list[Seen]:
    """Compute the maps of the first `number` scenes that ask about one object."""
    with Occluder.of(target, list(overrides), print, recipe=None, split=SPLIT) as occluder:
        settings, tasks = occluder.eval_set.config.environment, occluder.eval_set.tasks
        assert isinstance(settings, ShapesEnvironment), "only rows of the shapes environment have known boxes"
        boxes = {row: box for row in range(len(tasks)) if (box := asked_box(tasks[row], row, settings))}
        rows = list(boxes)[:number]
        found = occluder.maps([Asked(row=row) for row in rows], hidden, lambda _: None)
        return [seen(one, tasks[one.row], boxes[one.row]) for one in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a run of the shapes recipe, or one of its checkpoints")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--patch-px", type=int, default=None)
    given = parser.parse_args()
    target = parse_target(given.run)
    target = target if isinstance(target, CheckpointTarget) else find_checkpoint(given.run)
    scenes = maps_of(target, given.scenes, Wanted(patch_px=given.patch_px), given.overrides)
    Console(width=120).print(table_of(scenes, f"{len(scenes)} {SPLIT} scenes, {target.name}"))


if __name__ == "__main__":
    main()
