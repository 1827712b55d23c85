"""Graders that ask a model in addition to the environment's grader, as a part of the reward or as a second opinion."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from PIL.Image import Image

from fovea_gym.environments.dataset_prompts import question_of
from fovea_gym.graders.base import Grader, weighted_turns
from fovea_gym.rows.images import OpenImage
from fovea_gym.types import Score, Task, Turn
from fovea_gym.utils.event_loop import gather_or_cancel

RIGHT = 0.5
"""Accuracy above which an answer counts as right for the tool bonus."""
ACCEPT_SCORE = 0.8
"""Lowest judge score at which an answer counts as right."""
AskJudge: TypeAlias = Callable[[Sequence[Image], str, str, Sequence[str]], Awaitable[float]]
"""A function of images, question, answer and references that returns a score in 0..1: `judge.JudgeClient.score`."""


class ScoresAnswers(Protocol):
    """A reward model for text, or for text and images; its calls block."""

    def score(self, question: str, answer: str, images: Sequence[Image]) -> float: ...


@runtime_checkable
class Overrulable(Grader, Protocol):
    """A rule-based grader whose verdict another grader may overrule."""

    def overruled(self, score: Score, *, right: bool) -> Score:
        """The score that the same episode would have had if the rule had found its answer right, or wrong."""
        ...


class JudgeScores:
    """A judge model used as the grader of the last turn."""

    def __init__(
        self,
        ask: AskJudge,
        open_image: OpenImage,
        references: Callable[[Task], Sequence[str]] = lambda task: [task.answer],
    ) -> None:
        self._ask = ask
        self._open_image = open_image
        self._references = references

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        """The judge's score as reward and accuracy; NoScoreError if the judge gives none."""
        # in a thread: images may be downloaded, which must not delay the replies to other calls
        images = await asyncio.to_thread(lambda: [self._open_image(ref) for ref in task.images])
        judged = await self._ask(images, question_of(task), turns[-1].text, self._references(task))
        return Score(reward=judged, accuracy=judged)


class RewardModelScores(JudgeScores):
    """A reward model used as the grader of the last turn."""

    def __init__(self, model: ScoresAnswers, open_image: OpenImage) -> None:
        async def ask(images: Sequence[Image], question: str, answer: str, _references: object) -> float:
            return await asyncio.to_thread(model.score, question, answer, images)

        super().__init__(ask, open_image)


@dataclass(frozen=True, slots=True)
class GivenScore:
    """A grader that returns the score that the session gave its episode."""

    given: Score

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        return self.given


@dataclass(frozen=True, slots=True, kw_only=True)
class WithModelReward:
    """Weighted sum of the environment's reward and the scores of models; the accuracy stays the environment's."""

    own: Grader
    models: Sequence[tuple[str, Grader, float]]
    """For each model, the name of its score among the parts, its grader, and its share of the reward."""

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        graders, shares = [model for _, model, _ in self.models], [share for *_, share in self.models]
        own, *scores = await gather_or_cancel([grader.score(task, turns) for grader in (self.own, *graders)])
        weighted = list(zip((1 - sum(shares), *shares), (own, *scores), strict=True))
        parts = {name: score.reward for (name, *_), score in zip(self.models, scores, strict=True)}
        reward = weighted[0][0] * own.reward
        for share, score in weighted[1:]:
            reward += share * score.reward
        by_turn = weighted_turns(weighted, len(turns))
        return replace(own, reward=reward, parts={**own.parts, **parts}, turns=by_turn)


@dataclass(frozen=True, slots=True, kw_only=True)
class WithToolBonus:
    """Adds a bonus for a right answer after a successful tool call (part `tool_bonus`), as in arXiv 2505.14362."""

    own: Grader
    bonus: float

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        own = await self.own.score(task, turns)
        results = [message for turn in turns for message in turn.messages if message.role == "tool"]
        earned = self.bonus * (own.accuracy > RIGHT and any(not message.failed for message in results))
        by_turn = (*own.turns[:-1], own.turns[-1] + earned) if own.turns else ()
        return replace(own, reward=own.reward + earned, parts={**own.parts, "tool_bonus": earned}, turns=by_turn)


def beside(grader: Grader, given: GivenScore) -> Grader:
    """A copy of a grader in which the session's score replaces the environment's own grader."""
    match grader:
        case WithModelReward():
            return replace(grader, own=given)
        case WithToolBonus():
            return replace(grader, own=beside(grader.own, given))
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class WithSecondOpinion:
    """The rule's verdict, unless a judge disagrees; the part `overruled` is 1 if the judge overruled it."""

    rule: Overrulable
    judge: Grader
    ask: Literal["wrong", "always"]

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        own = await self.rule.score(task, turns)
        judge_says = rule_says = own.accuracy > 0
        if not rule_says or self.ask == "always":
            judge_says = (await self.judge.score(task, turns)).reward >= ACCEPT_SCORE
        score = own if judge_says == rule_says else self.rule.overruled(own, right=judge_says)
        return replace(score, parts={**score.parts, "overruled": float(judge_says != rule_says)})
