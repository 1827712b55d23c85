"""The protocol of an environment: the rows of a task, the prompt of a row, the turns that follow an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

from fovea_gym.tools.base import Tool
from fovea_gym.types import AnswerEnd, Message, Score, Task, Turn

if TYPE_CHECKING:  # readers of files, which environments that draw their rows start without
    from fovea_gym.rows.rows import RowAccess

Split: TypeAlias = Literal["train", "dev", "test"]


@runtime_checkable
class MakesEnvironment(Protocol):
    """Settings of an environment in another package, which make it."""

    def make_environment(self, access: RowAccess, seed: int) -> object:
        """Make an `Environment` with a method `score`, or with the property `graders`; `access` reads rows in files."""
        ...


class Session(Protocol):
    """The model's counterpart in one episode, with state, such as a game; it may score it (`ScoresEpisode`)."""

    async def reply(self, turns: Sequence[Turn]) -> Sequence[Message] | None:
        """The messages that answer the last of these turns; None ends the episode."""
        ...

    async def close(self) -> None:
        """Free what the session holds. Called once, however the episode ends."""
        ...


@runtime_checkable
class ScoresEpisode(Protocol):
    """A session that scores its episode, instead of the environment's graders."""

    async def score(self, turns: Sequence[Turn]) -> Score | None:
        """The score of the episode, None for that of graders; called once, after the last turn and before `close`."""
        ...


@runtime_checkable
class OpensSessions(Protocol):
    """An environment whose episodes have state; its `reply` is not called."""

    async def open(self, task: Task, seed: int) -> Session:
        """Begin an episode. `seed` is different for each episode of a run, and the same in a resumed run."""
        ...


@runtime_checkable
class UsesTools(Protocol):
    """An environment whose model may call tools: Fovea answers turns with calls, which count among its `max_turns`."""

    def tools(self, task: Task) -> Sequence[Tool]:
        """The tools of an episode, the same for every call with one task."""
        ...


@runtime_checkable
class BringsTools(Protocol):
    """A session with tools bound to it; they replace the tools that its environment lists for the task."""

    def tools(self) -> Sequence[Tool]:
        """The tools, with the specs of the environment's."""
        ...


@runtime_checkable
class LimitsSessions(Protocol):
    """An environment of whose sessions only so many may be open at once."""

    max_open: int


@runtime_checkable
class LimitsTurns(Protocol):
    """An environment whose tasks differ in their most turns; `max_turns` is the largest."""

    def turns_of(self, task: Task) -> int:
        """The most turns of an episode of this task."""
        ...


class Environment(Protocol):
    """A task family. Stateless: all that a method needs is in its arguments. Graders, or its sessions, score it."""

    max_turns: int = 1
    """The most turns of an episode; `reply` is asked while there are fewer."""
    answer_end: AnswerEnd | None = None
    """The end of the answer in a response (`rollout.stop_after_answer`); None: answers have none."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """The rows of a split, lazily where they are many; equal for equal settings."""
        ...

    def prompt(self, task: Task) -> Sequence[Message]:
        """The messages that open the episode."""
        ...

    def reply(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message] | None:
        """The messages that answer the model's last turn; None ends the episode."""
        return None

    def target(self, task: Task) -> str:
        """An answer to the prompt that scores full marks."""
        ...

    def demonstration(self, task: Task) -> Sequence[str]:
        """The model's side of an episode with full marks, one answer per turn: supervised warm-up trains on it."""
        return (self.target(task),)
