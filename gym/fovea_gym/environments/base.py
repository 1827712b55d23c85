"""Base classes of environments and of sessions, the environment's side of an episode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, TypeAlias

from fovea_gym.environments.stages import Stage
from fovea_gym.graders.base import Grader
from fovea_gym.graders.grading import Grading
from fovea_gym.tools.base import Tool
from fovea_gym.types import AnswerEnd, Message, Score, Task, Turn

Split: TypeAlias = Literal["train", "dev", "test"]


class Session(ABC):
    """The environment's side of one episode, which may have state, such as that of a game."""

    @abstractmethod
    async def reply(self, turns: Sequence[Turn]) -> Sequence[Message] | None:
        """The messages that answer the last of these turns; None ends the episode."""

    async def score(self, turns: Sequence[Turn]) -> Score | None:
        """The score of the episode; None if graders score it. Called once, after the last turn and before `close`."""
        return None

    @property
    def has_score(self) -> bool:
        """True if `score` may return a score."""
        return defines(self, "score")

    def tools(self) -> Sequence[Tool] | None:
        """Tools bound to this session, with the specs of the environment's tools; None to use the environment's."""
        return None

    async def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Release the session's resources. Called once, however the episode ends."""


class Environment(ABC):
    """A family of tasks. Stateless: a method needs only its arguments. Graders or sessions score the episodes.

    A subclass defines the rows, prompts and answers; everything else has a default, for one turn without tools.
    """

    max_turns: int = 1
    """The most turns of an episode; `reply` is called while there are fewer."""
    answer_end: AnswerEnd | None = None
    """Marks the end of the answer in a response (`rollout.stop_after_answer`); None: nothing marks it."""
    max_open: int | None = None
    """The most sessions that may be open at once; None: any number."""
    has_demonstrations: bool = True
    """False if no answer with full marks is known; `target` then only shows the format of an answer."""
    stages: Sequence[Stage] = ()
    """The stages of the curriculum, from the easiest to the last, each with its grader."""
    default_starts: Sequence[int] = ()
    """Steps at which the second and later stages begin."""
    graders: tuple[Grader, ...]
    """One for each stage, or one for all. A class without graders has a method `score`, or sessions with one."""

    @abstractmethod
    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split, made lazily if there are many; the same for the same settings."""

    @abstractmethod
    def prompt(self, task: Task) -> Sequence[Message]:
        """The messages that open the episode."""

    @abstractmethod
    def target(self, task: Task) -> str:
        """An answer to the prompt that gets full marks."""

    def demonstration(self, task: Task) -> Sequence[str]:
        """The model's side of an episode with full marks, one answer per turn; the supervised warm-up trains on it."""
        return (self.target(task),)

    def turns_of(self, task: Task) -> int:
        """The most turns of an episode of this task, at most `max_turns`."""
        return self.max_turns

    def reply(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message] | None:
        """The messages that answer the model's last turn; None ends the episode. Not called if `open` is overridden."""
        return None

    def tools(self, task: Task) -> Sequence[Tool]:
        """The tools of an episode, always the same for one task; turns with tool calls count towards `max_turns`."""
        return ()

    @property
    def uses_tools(self) -> bool:
        """True if the model may call tools of the environment."""
        return defines(self, "tools")

    async def open(self, task: Task, seed: int) -> Session:
        """Begin an episode. `seed` is different for each episode of a run, and the same in a resumed run."""
        return OwnReplies(self, task)

    @property
    def has_sessions(self) -> bool:
        """True if `open` begins episodes with state, whose calls may wait."""
        return defines(self, "open")

    def grading(self) -> Grading:
        """The graders with the limits of their calls; by default those in `graders`, which never wait."""
        return Grading(graders=self.graders)


def defines(given: object, name: str) -> bool:
    """True if an environment or session defines a method or value itself; it need not derive from these classes."""
    base = next((base for base in (Environment, Session) if isinstance(given, base)), object)
    is_default = getattr(type(given), name, None) is getattr(base, name, base)
    return hasattr(given, name) and (not is_default or name in vars(given))


class OwnReplies(Session):
    """The stateless replies of an environment that never waits, as a session."""

    def __init__(self, environment: Environment, task: Task) -> None:
        self._environment = environment
        self._task = task

    async def reply(self, turns: Sequence[Turn]) -> Sequence[Message] | None:
        return self._environment.reply(self._task, turns)
