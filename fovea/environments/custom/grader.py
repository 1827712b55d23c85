"""Graders from the user's code: a reward function, or the `score` of a class.

Whatever that code does, a score is finite, or its absence is named: the call raised, or what it returned is not a
score.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import SupportsFloat, TypeAlias, overload

from PIL.Image import Image

from fovea.config.rewards import OVERLONG
from fovea.data.images import OpenImage
from fovea.environments.custom.trl import RewardFunction, is_async
from fovea.environments.graders.base import NoScoreError
from fovea.environments.graders.limited_calls import BlockingCalls
from fovea.errors import describe_error, named
from fovea.types import ImageRef, Mark, Score, Task, Turn

REWARD, ACCURACY, IMAGE_PARTS, MARKS, TURNS = "reward", "accuracy", "image_parts", "marks", "turns"
MAX_PARTS = 100
"""The most parts of a score, and of each of its images: every part is a line of every step's metrics."""
MAX_MARKS = 100
"""The most boxes and points of a score, all of which are kept with it and drawn."""
BESIDE_PARTS = (IMAGE_PARTS, MARKS, TURNS)
"""Keys of a mapping that are not parts of the reward."""
SAME_SUM = 1e-4
"""Difference from their sum, relative to sizes above 1, at which a reward contradicts those of its turns."""
ScoreFunction: TypeAlias = Callable[[Task, Sequence[Turn]], object]
"""The user's `score(task, turns)`, plain or async: a `Score`, a number or a mapping of named parts."""


class UserGrader:
    """A function of the user's as a grader. A plain one blocks, and is called in threads."""

    def __init__(self, function: ScoreFunction, threads: BlockingCalls) -> None:
        """Stages of one environment share `threads`, which count the calls that were given up."""
        self._function = function
        self._threads = threads
        self.call = self._awaited if inspect.iscoroutinefunction(function) else self._in_a_thread

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        """NoScoreError where the function raises, or returns what is not a score."""
        return checked_score(await self.call(task, turns), task, turns)

    async def _in_a_thread(self, task: Task, turns: Sequence[Turn]) -> object:
        return await self._threads.run(lambda: self._function(task, turns))

    async def _awaited(self, task: Task, turns: Sequence[Turn]) -> object:
        with named(lambda error: NoScoreError(describe_error(error))):
            returned = self._function(task, turns)
            assert inspect.isawaitable(returned), self._function
            try:
                return await returned
            # which would end the event loop of the graders, or look like its end
            except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
                running = asyncio.current_task()
                if running is not None and running.cancelling():  # by the time limit, or since the run ends
                    raise
                raise NoScoreError(describe_error(error)) from error


def checked_score(returned: object, task: Task, turns: Sequence[Turn]) -> Score:
    """The score that the user's code returned for an answer to a task; NoScoreError where it is none."""
    try:
        score = score_of(returned, num_images=len(task.images))
    except ValueError as error:
        raise NoScoreError(f"returned {error}") from error
    if len(score.turns) not in (0, len(turns)):
        raise NoScoreError(
            f"returned {len(score.turns)} rewards as {TURNS} of an episode of {len(turns)}; give one each"
        )
    return score


def score_function(reward: RewardFunction, open_image: OpenImage) -> ScoreFunction:
    """A reward function, plain or async, which is called with the text of the last turn and the images of the task."""

    def call(task: Task, turns: Sequence[Turn]) -> object:
        return reward(task, turns[-1].text, OpenedImages(task.images, open_image))

    async def call_async(task: Task, turns: Sequence[Turn]) -> object:
        returned = call(task, turns)
        assert inspect.isawaitable(returned), reward
        return await returned

    return call_async if is_async(reward) else call


class OpenedImages(Sequence[Image]):
    """The images of a task, each opened at its first use."""

    def __init__(self, refs: Sequence[ImageRef], open_image: OpenImage) -> None:
        self._refs = refs
        self._open_image = open_image
        self._opened: dict[int, Image] = {}

    def __len__(self) -> int:
        return len(self._refs)

    @overload
    def __getitem__(self, index: int) -> Image: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Image]: ...
    def __getitem__(self, index: int | slice) -> Image | Sequence[Image]:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        place = range(len(self))[index]
        if place not in self._opened:
            self._opened[place] = self._open_image(self._refs[place])
        return self._opened[place]


def score_of(returned: object, *, num_images: int) -> Score:
    """The score that the user's code returned; ValueError where it is none.

    A number is the reward. Of named parts it is the part `reward`, else their sum. The accuracy is the part
    `accuracy`, else the reward, held to 0..1. `image_parts` is a list with a mapping of parts for every image, `marks`
    a list of `types.Mark`s, `turns` a list with the reward of every turn, which then sum to the reward.
    """
    if isinstance(returned, Score):
        _number(returned.accuracy, "accuracy")
        return _checked(returned, num_images)
    if not isinstance(returned, Mapping):
        reward = _number(returned, "")
        return Score(reward=reward, accuracy=_held(reward))
    parts = {str(name): _number(value, str(name)) for name, value in returned.items() if name not in BESIDE_PARTS}
    images, marks, turns = (returned.get(key, ()) for key in BESIDE_PARTS)
    _check_turns(turns)
    if not parts and not turns:
        raise ValueError(f"{returned!r:.60}, which names no part and no reward")
    reward = parts.pop(REWARD, sum(turns or parts.values()))
    accuracy = _held(parts.get(ACCURACY, reward))
    score = Score(reward=reward, accuracy=accuracy, parts=parts, image_parts=images, marks=marks, turns=turns)
    return _checked(score, num_images)


def _checked(score: Score, num_images: int) -> Score:
    """The score with plain numbers throughout."""
    _check_forms(score.parts, score.image_parts, score.marks)
    _check_turns(score.turns)
    num_parts = max(map(len, (score.parts, *score.image_parts)))
    if num_parts > MAX_PARTS:
        raise ValueError(f"{num_parts} parts, and each is a separate metric; return at most {MAX_PARTS}")
    _check_names(score.parts)
    if score.image_parts and len(score.image_parts) != num_images:
        raise ValueError(f"{IMAGE_PARTS} for {len(score.image_parts)} images, but the task has {num_images}")
    if len(score.marks) > MAX_MARKS:
        raise ValueError(f"{len(score.marks)} {MARKS}; return at most {MAX_MARKS}")
    reward, by_turn = _number(score.reward, REWARD), sum(score.turns)
    if len(score.turns) and abs(reward - by_turn) > SAME_SUM * max(1.0, abs(reward), abs(by_turn)):
        raise ValueError(f"a reward of {reward:g}, but {TURNS} that sum to {by_turn:g}; give turns without a reward")
    return Score(
        reward=reward,
        accuracy=_held(score.accuracy),
        parts={str(name): _number(value, str(name)) for name, value in score.parts.items()},
        image_parts=tuple(
            {str(name): _number(value, f"{name} of image {place}") for name, value in parts.items()}
            for place, parts in enumerate(score.image_parts, start=1)
        ),
        marks=tuple(_checked_mark(mark, num_images) for mark in score.marks),
        turns=tuple(map(float, score.turns)),
    )


def _check_forms(parts: object, images: object, marks: object) -> None:
    """ValueError for what is not of the type that the field of a score has, such as None for no parts."""
    if not isinstance(parts, Mapping):
        raise ValueError(f"{parts!r:.60} as parts, which is not a mapping of names to numbers")
    if not isinstance(images, Sequence) or not all(isinstance(image, Mapping) for image in images):
        raise ValueError(f"{images!r:.60} as {IMAGE_PARTS}, which is not a list of mappings, one for each image")
    if not isinstance(marks, Sequence) or not all(isinstance(mark, Mark) for mark in marks):
        raise ValueError(f"{marks!r:.60} as {MARKS}, which is not a list of fovea.types.Mark")


def _check_turns(turns: object) -> None:
    """ValueError for rewards of turns that are not a list of finite numbers."""
    if not isinstance(turns, Sequence) or isinstance(turns, str | bytes):
        raise ValueError(f"{turns!r:.60} as {TURNS}, which is not a list with the reward of every turn")
    for place, value in enumerate(turns, start=1):
        _number(value, f"the reward of turn {place}")


def _check_names(parts: Mapping[str, object]) -> None:
    """ValueError for a part whose name can be no metric's."""
    if OVERLONG in parts:
        raise ValueError(
            f"a part {OVERLONG}: the metric reward/{OVERLONG} is the penalty of algorithm.{OVERLONG}; rename it"
        )
    for name in map(str, parts):
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise ValueError(f"a part {name!r:.60}, which holds half of a UTF-16 pair, which no plot shows; rename it")


def _checked_mark(mark: Mark, num_images: int) -> Mark:
    image = _number(mark.image, "the image of a mark")
    xy: object = mark.xy
    if not isinstance(xy, Iterable) or len(corners := tuple(xy)) not in (2, 4):
        raise ValueError(f"a mark at {xy!r:.60}; give x, y of a point or x1, y1, x2, y2 of a box")
    if image not in range(1, num_images + 1):
        raise ValueError(f"a mark on image {image:g}, but the task has {num_images} images, counted from 1")
    return Mark(image=int(image), xy=tuple(_number(value, MARKS) for value in corners), label=str(mark.label))


def _number(value: object, name: str) -> float:
    """A number of Python, numpy or torch; ValueError for anything else, and for one that is not finite."""
    called = f" as {name}" if name else ""
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        no_return = " (is there a `return`?)" if value is None and not name else ""
        raise ValueError(f"{value!r:.60}{called}, which is not a number{no_return}; a score is one, or parts by name")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # arrays of several values, as numpy and torch say it
        raise ValueError(f"{value!r:.60}{called}, which is not one number") from None
    if not math.isfinite(number):
        raise ValueError(f"{number}{called}, which is not finite")
    return number


def _held(value: float) -> float:
    return min(max(float(value), 0.0), 1.0)
