"""The grader of the user's reward functions: of one, or of a list whose weighted sum is the reward of an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fovea.config.rewards import part_name
from fovea.data.images import OpenImage
from fovea.environments.custom.grader import UserGrader, checked_score, score_function
from fovea.environments.custom.trl import RewardFunction
from fovea.environments.graders.base import Grader, NoScoreError, weighted_turns
from fovea.environments.graders.limited_calls import BlockingCalls
from fovea.types import Score, Task, Turn


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
    """The user's reward functions by name, called one after the other.

    Each is logged under its name, without its weight, and its parts as NAME/PART. One that returns None has no say in
    this episode, as with TRL. The accuracy is that of the first that answers.
    """

    def __init__(self, specs: Sequence[str], graders: Sequence[UserGrader], weights: Sequence[float] | None) -> None:
        """`specs` are the names of the functions in the settings; without `weights` each counts once."""
        names = [part_name(spec) for spec in specs]
        self._graders = dict(zip(names, graders, strict=True))
        self._weights = dict(zip(names, weights or [1.0] * len(names), strict=True))

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        """NoScoreError where a function raises, returns what is not a score, or all return None."""
        scores = {name: await self._score(name, task, turns) for name in self._graders}
        found = {name: score for name, score in scores.items() if score is not None}
        if not found:
            raise NoScoreError("returned None, each of them; one has to return a number or named parts")
        return Score(
            reward=sum(self._weights[name] * score.reward for name, score in found.items()),
            accuracy=next(iter(found.values())).accuracy,
            parts={key: value for name, score in found.items() for key, value in _parts(name, score).items()},
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


def _parts(name: str, score: Score) -> dict[str, float]:
    return {name: score.reward, **{f"{name}/{part}": value for part, value in score.parts.items()}}


def _image_parts(scores: Mapping[str, Score]) -> tuple[Mapping[str, float], ...]:
    """Parts of each image, from all rewards that distinguish images."""
    given = {name: score.image_parts for name, score in scores.items() if score.image_parts}
    return tuple(
        {f"{name}/{part}": value for name, each in zip(given, image, strict=True) for part, value in each.items()}
        for image in zip(*given.values(), strict=True)
    )
