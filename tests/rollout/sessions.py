"""Environments with sessions as a user writes them, and an engine without a model that converses with them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fovea.config.run import Config
from fovea.data.prompt_source import PromptedTask
from fovea.rollout.collect import Interaction, collect
from fovea.rollout.conversation import SessionLog
from fovea.types import Completion, Episode, Group, Prompt, Request, Sampling
from fovea.wiring.environment import make_environment
from fovea_gym.environments.access import GradedEnvironment
from fovea_gym.types import Message, Score, Task, Turn
from fovea_gym.utils.event_loop import wait_for
from tests.fakes import BanditRenderer
from tests.records import completion_of, text_prompt

MORE = [Message(role="user", parts=("go on",))]


class Echo:
    """Draws one token for every completion, and notes the ids of the requests in their order."""

    def __init__(self, *, repeats_in_rounds: bool = False) -> None:
        self.repeats_in_rounds = repeats_in_rounds
        self.ids: list[str] = []

    async def generate(self, request: Request) -> Sequence[Completion]:
        self.ids.append(request.id)
        await asyncio.sleep(0)
        return [completion_of([1], id=f"{request.id}/{k}", text="a") for k in range(request.n)]


class TwoTokenReplies(BanditRenderer):
    """Renders a prompt as one token, and each reply as two."""

    def observation(self, messages: Sequence[Message], *, after: int, where: str = "") -> Prompt:
        return text_prompt([2, 3])


class Rows:
    """Rows of a user's environment, whose episodes have two turns."""

    max_turns = 2

    def tasks(self, split: str) -> list[Task]:
        return [Task(id=f"{split}/{index}", question="a", answer="a") for index in range(64)]

    def prompt(self, task: Task) -> list[Message]:
        return [Message(role="user", parts=(task.question,))]

    def target(self, task: Task) -> str:
        return task.answer

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        return Score(reward=float(len(turns)), accuracy=1.0)


class Scores:
    """A session that scores its episode."""

    def reply(self, turns: Sequence[Turn]) -> list[Message]:
        return MORE

    def score(self, turns: Sequence[Turn]) -> Score:
        return Score(reward=4.0, accuracy=1.0, turns=(1.0, 3.0))


class ScoredEpisodes(Rows):
    def open(self, task: Task, seed: int) -> Scores:
        return Scores()


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout of `Echo`: its groups, the reasons of those left out, and the log of its sessions."""

    groups: Sequence[Group]
    unscored: Sequence[str]
    log: SessionLog

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.groups for episode in group.episodes]


def limited(user: object, settings: Mapping[str, object] | None = None, **session: object) -> GradedEnvironment:
    """The environment of a user's object in a run with these settings, also of `environment.session`."""
    of_run = {"model": {"tiny": {}}, "environment": {"name": "shapes", "session": session}, **(settings or {})}
    return make_environment(Config.model_validate(of_run), user)


async def sampled(
    made: GradedEnvironment,
    engine: Any,
    rows: int = 4,
    n: int = 2,
    *,
    max_tokens: int | None = None,
    unscored: list[str] | None = None,
    log: SessionLog | None = None,
) -> list[Group]:
    """Groups of `n` episodes of the first rows."""
    render = TwoTokenReplies()
    tasks = made.environment.tasks("train")[:rows]
    prompted = [PromptedTask(task=task, prompt=render.prompt(made.environment.prompt(task))) for task in tasks]
    return await collect(
        engine,
        Interaction(environment=made.environment, grading=made.grading, renderer=render, max_tokens=max_tokens),
        prompted,
        sampling=Sampling(max_new_tokens=1),
        n=n,
        seed=(0,),
        unscored=unscored,
        sessions=log,
        fewest=min(n, 2),  # as where episodes are compared
    )


def rolled_out(
    made: GradedEnvironment, rows: int = 4, n: int = 2, *, engine: Echo | None = None, max_tokens: int | None = None
) -> Rollout:
    """As `sampled`, with what was left out."""
    unscored, log = list[str](), SessionLog()
    groups = wait_for(sampled(made, engine or Echo(), rows, n, max_tokens=max_tokens, unscored=unscored, log=log))
    return Rollout(groups=groups, unscored=unscored, log=log)
