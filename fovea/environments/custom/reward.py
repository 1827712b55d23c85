"""The user's own scores: a function in place of an environment's grader, or a class that is the environment.

Whatever that code does, a score is finite, or its absence is named: it raised, it took too long, or what it returned
is no score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, SupportsFloat, overload

from PIL.Image import Image

from fovea.data.images import OpenImage
from fovea.environments.base import UNSCORED, Environment, Split, WaitsToScore
from fovea.environments.curriculum import Stage, Staged
from fovea.environments.custom.loading import RewardFunction
from fovea.environments.custom.timeouts import FailedCallError, TimedCalls
from fovea.errors import DataError, ScoreError, UnscoredError, first_line, named
from fovea.types import ImageRef, Message, Score, Task, Turn

REWARD, ACCURACY, IMAGE_PARTS = "reward", "accuracy", "image_parts"
MAX_PARTS = 100
"""Of a score, and of each of its images: every part is a line of every step's metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """How the user's code is called."""

    timeout_seconds: float = 10.0
    on_failure: Literal["error", "drop"] = "error"
    calls_at_once: int = 1


class OpenedImages(Sequence[Image]):
    """The images of a task, each opened when it is first looked at."""

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


class OwnReward:
    """Rows and prompts of an environment, scored by a function; the environment's own grader is not asked.

    It has no stages: those of an environment are about its own score.
    """

    def __init__(
        self,
        environment: Environment,
        function: RewardFunction,
        open_image: OpenImage,
        *,
        limits: CallLimits | None = None,
        name: str = "reward",
    ) -> None:
        self._environment = environment
        self._function = function
        self._open_image = open_image
        self._calls = ScoringCalls(limits or CallLimits(), name)

    @property
    def scores_at_once(self) -> int:
        return self._calls.limits.calls_at_once

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._environment.tasks(split)

    def prompt(self, task: Task) -> Sequence[Message]:
        return self._environment.prompt(task)

    def target(self, task: Task) -> str:
        return self._environment.target(task)

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        """ScoreError or UnscoredError where the function gives none."""
        images = OpenedImages(task.images, self._open_image)
        return self._calls.score(task, lambda: self._function(task, turns[-1].text, images))


class GuardedEnvironment:
    """A class of the user's, its errors named and its scores checked and waited for.

    Its stages, where it has any (`curriculum.Staged`), are those of the class.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        limits: CallLimits | None = None,
        name: str = "environment",
        calls: ScoringCalls | None = None,
    ) -> None:
        """`calls` counts the late ones of all stages."""
        self._environment = environment
        self._limits = limits or CallLimits()
        self._name = name
        self._calls = calls or ScoringCalls(self._limits, f"{name}.score")

    @property
    def scores_at_once(self) -> int:
        own = self._environment
        return own.scores_at_once if isinstance(own, WaitsToScore) else self._limits.calls_at_once

    def tasks(self, split: Split) -> Sequence[Task]:
        with self._named("tasks", split):
            tasks = self._environment.tasks(split)
            first = tasks[0] if len(tasks) else None
        if first is None:
            raise DataError(f"{self._name}.tasks({split!r}) holds no rows; return some for every split")
        if not isinstance(first, Task):
            raise DataError(f"{self._name}.tasks({split!r}) holds {first!r:.60}; return a list of fovea.types.Task")
        return tasks

    def prompt(self, task: Task) -> Sequence[Message]:
        with self._named("prompt", task.id):
            return self._environment.prompt(task)

    def target(self, task: Task) -> str:
        with self._named("target", task.id):
            return self._environment.target(task)

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        """ScoreError or UnscoredError where the class gives none."""
        return self._calls.score(task, lambda: self._environment.score(task, turns))

    @property
    def stages(self) -> Sequence[Stage]:
        return self._environment.stages if isinstance(self._environment, Staged) else ()

    @property
    def default_starts(self) -> Sequence[int]:
        return self._environment.default_starts if isinstance(self._environment, Staged) else ()

    def at(self, stage: int) -> Environment:
        if not isinstance(self._environment, Staged):
            return self
        return GuardedEnvironment(self._environment.at(stage), limits=self._limits, name=self._name, calls=self._calls)

    def _named(self, method: str, where: str) -> AbstractContextManager[None]:
        return named(lambda error: DataError(f"{where}: {self._name}.{method} raised {first_line(error)}; mend it"))


class WrongIfUnscored:
    """The same environment for readings: an answer that the user's code gives no score counts as wrong, and is noted.

    A reading has no group to leave out, and leaving out the row would flatter the model.
    """

    def __init__(self, environment: OwnReward | GuardedEnvironment, note: Callable[[str], None]) -> None:
        self._environment = environment
        self._note = note

    @property
    def scores_at_once(self) -> int:
        return self._environment.scores_at_once

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._environment.tasks(split)

    def prompt(self, task: Task) -> Sequence[Message]:
        return self._environment.prompt(task)

    def target(self, task: Task) -> str:
        return self._environment.target(task)

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        try:
            return self._environment.score(task, turns)
        except UnscoredError as error:
            self._note(f"{task.id}: {error}")
            return Score(reward=0.0, accuracy=0.0, parts={UNSCORED: 1.0})


def for_readings(environment: Environment, note: Callable[[str], None]) -> Environment:
    """The environment as held-out rows are scored by it; `note` is told of each answer that got no score."""
    if isinstance(environment, OwnReward | GuardedEnvironment):
        return WrongIfUnscored(environment, note)
    return environment


class ScoringCalls:
    """Calls of the user's code for a score: what they return as a `Score`, or why there is none."""

    def __init__(self, limits: CallLimits, name: str) -> None:
        self.limits = limits
        self._name = name
        self._timed = TimedCalls(limits.timeout_seconds)

    def score(self, task: Task, call: Callable[[], object]) -> Score:
        """UnscoredError with `on_failure: drop`, else ScoreError, where the call fails or returns no score."""
        try:
            return score_of(self._timed(call, self._name), num_images=len(task.images))
        except FailedCallError as error:
            raise self._failed(str(error)) from error
        except ValueError as error:
            raise self._failed(f"{self._name} returned {error}") from error

    def _failed(self, text: str) -> ScoreError:
        if self.limits.on_failure == "drop":
            return UnscoredError(text)
        return ScoreError(f"{text}; mend it, or set reward_on_failure=drop to leave such groups out")


def score_of(returned: object, *, num_images: int) -> Score:
    """What the user's code returned as a score; ValueError where it is none.

    A number is the reward. Of named parts it is the part `reward`, else their sum. The accuracy is the part
    `accuracy`, else the reward, held to 0..1. `image_parts` is a list with a mapping of parts for every image.
    """
    if isinstance(returned, Score):
        _number(returned.accuracy, "accuracy")
        return _checked(returned, num_images)
    if not isinstance(returned, Mapping):
        reward = _number(returned, "")
        return Score(reward=reward, accuracy=_held(reward))
    parts = {str(name): _number(value, str(name)) for name, value in returned.items() if name != IMAGE_PARTS}
    if not parts:
        raise ValueError(f"{returned!r:.60}, which names no part and no reward")
    reward = parts[REWARD] if REWARD in parts else sum(parts.values())
    accuracy = _held(parts.get(ACCURACY, reward))
    parts.pop(REWARD, None)
    images = returned.get(IMAGE_PARTS, ())
    if not isinstance(images, Sequence) or not all(isinstance(image, Mapping) for image in images):
        raise ValueError(f"{images!r:.60} as {IMAGE_PARTS}, which is no list of mappings, one for each image")
    return _checked(Score(reward=reward, accuracy=accuracy, parts=parts, image_parts=tuple(images)), num_images)


def _checked(score: Score, num_images: int) -> Score:
    """The score with plain numbers throughout."""
    num_parts = max(map(len, (score.parts, *score.image_parts)))
    if num_parts > MAX_PARTS:
        raise ValueError(f"{num_parts} parts, and each is a metric of its own; return at most {MAX_PARTS}")
    if score.image_parts and len(score.image_parts) != num_images:
        raise ValueError(f"{IMAGE_PARTS} for {len(score.image_parts)} images, but the task has {num_images}")
    return Score(
        reward=_number(score.reward, REWARD),
        accuracy=_held(score.accuracy),
        parts={name: _number(value, name) for name, value in score.parts.items()},
        image_parts=tuple(
            {str(name): _number(value, f"{name} of image {place}") for name, value in parts.items()}
            for place, parts in enumerate(score.image_parts, start=1)
        ),
    )


def _number(value: object, name: str) -> float:
    """Python's, numpy's and torch's numbers; ValueError for anything else, and for one that is not finite."""
    called = f" as {name}" if name else ""
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        raise ValueError(f"{value!r:.60}{called}, which is no number")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # arrays of several values, as numpy and torch say it
        raise ValueError(f"{value!r:.60}{called}, which is not one number") from None
    if not math.isfinite(number):
        raise ValueError(f"{number}{called}, which is not finite")
    return number


def _held(value: float) -> float:
    return min(max(float(value), 0.0), 1.0)
