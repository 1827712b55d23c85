"""Graders that call the user's code: their scores are finite; a call that raises or returns no score is reported."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from numbers import Complex, Real
from typing import SupportsFloat, TypeAlias, overload

from PIL.Image import Image

from fovea_gym.environments.custom.signatures import BESIDE_PARTS, RewardFunction, is_async, length_of, takes_length
from fovea_gym.errors import describe_error, named
from fovea_gym.graders.base import Grader, NoScoreError, weighted_turns
from fovea_gym.graders.grading import BlockingCalls, called, without_ends
from fovea_gym.rows.images import OpenImage
from fovea_gym.settings.rewards import OVERLONG, part_name
from fovea_gym.types import ImageRef, Mark, Score, Task, Turn

REWARD, ACCURACY = "reward", "accuracy"
IMAGE_PARTS, MARKS, TURNS = BESIDE_PARTS
MAX_PARTS = 100
"""The most parts of a score, and of each of its images: every part becomes a metric of every step."""
MAX_MARKS = 100
"""The most boxes and points of a score, all of which are stored with it and drawn on its images."""
SAME_SUM = 1e-4
"""Largest difference between a reward and the sum of its turns' rewards, relative to values above 1."""
ScoreFunction: TypeAlias = Callable[[Task, Sequence[Turn]], object]
"""The user's `score(task, turns)`, plain or async: a `Score`, a number or a mapping of named parts."""


class UserGrader:
    """Grades with a function of the user; one that is not async is called in threads, since it blocks."""

    def __init__(self, function: ScoreFunction, threads: BlockingCalls) -> None:
        """Stages of one environment share `threads`, which count the calls that were abandoned."""
        self._function = function
        self._threads = threads

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        """The score that the function returns; NoScoreError if it raises or returns anything else."""
        return checked_score(await self.call(task, turns), task, turns)

    async def call(self, task: Task, turns: Sequence[Turn]) -> object:
        """The unchecked result of the function; NoScoreError if it raises."""
        with without_ends(), named(lambda error: NoScoreError(describe_error(error))):
            returned: object = await called(self._threads, self._function, task, turns)
        return returned


def reward_grader(
    reward: str | Sequence[str],
    functions: Sequence[RewardFunction],
    weights: Sequence[float] | None,
    open_image: OpenImage,
    calls: BlockingCalls,
) -> Grader:
    """The grader of the functions that the setting `reward` names."""
    graders = [UserGrader(score_function(function, open_image), calls) for function in functions]
    return graders[0] if isinstance(reward, str) else SeveralRewards(reward, graders, weights)


class SeveralRewards:
    """The user's reward functions by name. As in TRL, one that returns None is skipped. The first gives accuracy."""

    def __init__(self, specs: Sequence[str], graders: Sequence[UserGrader], weights: Sequence[float] | None) -> None:
        """`specs` are the names of the functions in the settings; without `weights`, each has the weight 1."""
        names = [part_name(spec) for spec in specs]
        self._graders = dict(zip(names, graders, strict=True))
        self._weights = dict(zip(names, weights or [1.0] * len(names), strict=True))

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        """The weighted sum; NoScoreError if a function raises or returns an invalid score, or if all return None."""
        scores = {name: await self._score(name, task, turns) for name in self._graders}
        found = {name: score for name, score in scores.items() if score is not None}
        if not found:
            raise NoScoreError("all returned None; at least one has to return a number or named parts")
        parts: dict[str, float] = {}
        for name, score in found.items():
            parts |= {name: score.reward, **{f"{name}/{part}": value for part, value in score.parts.items()}}
        return Score(
            reward=sum(self._weights[name] * score.reward for name, score in found.items()),
            accuracy=next(iter(found.values())).accuracy,
            parts=parts,
            image_parts=_image_parts(found),
            marks=tuple(mark for score in found.values() for mark in score.marks),
            turns=weighted_turns([(self._weights[name], score) for name, score in found.items()], len(turns)),
        )

    async def _score(self, name: str, task: Task, turns: Sequence[Turn]) -> Score | None:
        try:
            returned = await self._graders[name].call(task, turns)
            return None if returned is None else checked_score(returned, task, turns)
        except NoScoreError as error:
            raise NoScoreError(f"(in {name}) {error}") from error


def _image_parts(scores: Mapping[str, Score]) -> tuple[Mapping[str, float], ...]:
    """Parts of each image, from all rewards that distinguish images."""
    given = {name: score.image_parts for name, score in scores.items() if score.image_parts}
    return tuple(
        {f"{name}/{part}": value for name, each in zip(given, image, strict=True) for part, value in each.items()}
        for image in zip(*given.values(), strict=True)
    )


def checked_score(returned: object, task: Task, turns: Sequence[Turn]) -> Score:
    """The score that the user's code returned for an episode; NoScoreError if it is not a valid score."""
    try:
        score = score_of(returned, num_images=len(task.images))
    except ValueError as error:
        raise NoScoreError(f"returned {error}") from error
    if len(score.turns) not in (0, len(turns)):
        raise NoScoreError(
            f"returned {len(score.turns)} rewards as {TURNS}, but the episode has {len(turns)} turns; give one per turn"
        )
    return score


def score_function(reward: RewardFunction, open_image: OpenImage) -> ScoreFunction:
    """Make a score function that calls a reward function with the text of the last turn and the images of the task."""
    with_length = takes_length(reward)

    def call(task: Task, turns: Sequence[Turn]) -> object:
        last = turns[-1]
        more = {"response_length": length_of(last.text, last.num_tokens)} if with_length else {}
        return reward(task, last.text, OpenedImages(task.images, open_image), **more)

    async def call_async(task: Task, turns: Sequence[Turn]) -> object:
        returned = call(task, turns)
        assert inspect.isawaitable(returned), reward
        return await returned

    return call_async if is_async(reward) else call


class OpenedImages(Sequence[Image]):
    """The images of a task, each opened at its first use."""

    def __init__(self, refs: Sequence[ImageRef], open_image: OpenImage) -> None:
        self._num_images = len(refs)
        self._opened = cache(lambda place: open_image(refs[place]))

    def __len__(self) -> int:
        return self._num_images

    @overload
    def __getitem__(self, index: int) -> Image: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Image]: ...
    def __getitem__(self, index: int | slice) -> Image | Sequence[Image]:
        place = range(self._num_images)[index]
        return [self._opened(each) for each in place] if isinstance(place, range) else self._opened(place)


def score_of(returned: object, *, num_images: int) -> Score:
    """The score that the user's code returned; ValueError if it is not a valid score.

    A number is the reward. In a mapping of named parts, the reward is the part `reward` or else the sum of the parts,
    and the accuracy is the part `accuracy` or else the reward, clamped to 0..1. `image_parts` is a list with a mapping
    of parts for every image, `marks` a list of `types.Mark`, and `turns` a list with the rewards of the turns, whose
    sum is the reward.
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
    """The score, checked, with all its numbers as Python floats."""
    _check_forms(score.parts, score.image_parts, score.marks)
    _check_turns(score.turns)
    for parts in (score.parts, *score.image_parts):
        _check_parts(parts)
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
    """Raise ValueError for fields of a score that have the wrong type, such as None for no parts."""
    if not isinstance(parts, Mapping):
        raise ValueError(f"{parts!r:.60} as parts, which is not a mapping of names to numbers")
    if not isinstance(images, Sequence) or not all(isinstance(image, Mapping) for image in images):
        raise ValueError(f"{images!r:.60} as {IMAGE_PARTS}, which is not a list of mappings, one for each image")
    if not isinstance(marks, Sequence) or not all(isinstance(mark, Mark) for mark in marks):
        raise ValueError(f"{marks!r:.60} as {MARKS}, which is not a list of fovea_gym.types.Mark")


def _check_turns(turns: object) -> None:
    """Raise ValueError for rewards of turns that are not a list of finite numbers."""
    if not isinstance(turns, Sequence) or isinstance(turns, str | bytes):
        raise ValueError(f"{turns!r:.60} as {TURNS}, which is not a list with the reward of every turn")
    for place, value in enumerate(turns, start=1):
        _number(value, f"the reward of turn {place}")


def _check_parts(parts: Mapping[str, object]) -> None:
    """Raise ValueError for too many parts, or for a part whose name cannot be a metric's."""
    if len(parts) > MAX_PARTS:
        raise ValueError(f"{len(parts)} parts, and each is a separate metric; return at most {MAX_PARTS}")
    if OVERLONG in parts:
        raise ValueError(
            f"a part {OVERLONG}: the metric reward/{OVERLONG} is the penalty of algorithm.{OVERLONG}; rename it"
        )
    for name in map(str, parts):
        _check_characters(name, "a part")


def _check_characters(name: str, what: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise ValueError(f"{what} {name!r:.60}, which holds half of a UTF-16 pair, which no plot can show; rename it")


def _checked_mark(mark: Mark, num_images: int) -> Mark:
    image = _number(mark.image, "the image of a mark")
    xy: object = mark.xy
    if not isinstance(xy, Iterable) or len(corners := tuple(xy)) not in (2, 4):
        raise ValueError(f"a mark at {xy!r:.60}; give x, y of a point or x1, y1, x2, y2 of a box")
    if image not in range(1, num_images + 1):
        raise ValueError(f"a mark on image {image:g}, but the task has {num_images} images, counted from 1")
    _check_characters(str(mark.label), "a mark labelled")
    return Mark(image=int(image), xy=tuple(_number(value, MARKS) for value in corners), label=str(mark.label))


def _number(value: object, name: str) -> float:
    """Convert a number of Python, numpy or torch; ValueError for anything else, or if it is not finite."""
    called = f" as {name}" if name else ""
    is_complex = isinstance(value, Complex) and not isinstance(value, Real)  # numpy would drop the imaginary part
    if isinstance(value, str | bytes) or is_complex or not isinstance(value, SupportsFloat):
        no_return = " (is there a `return`?)" if value is None and not name else ""
        raise ValueError(f"{value!r:.60}{called}, which is not a number{no_return}; a score is a number or named parts")
    try:
        number = float(value)
    except OverflowError:  # of an int, which may also be too large to print
        raise ValueError(f"a number{called} beyond 1e308, which is not finite") from None
    except (TypeError, ValueError, RuntimeError):  # raised by numpy and torch for arrays of several values
        raise ValueError(f"{value!r:.60}{called}, which is not one number") from None
    if not math.isfinite(number):
        raise ValueError(f"{number}{called}, which is not finite")
    return number


def _held(value: float) -> float:
    return min(max(float(value), 0.0), 1.0)
