"""Episodes with tools: a turn with calls is answered with their results, other turns by the environment."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TextIO

from fovea_gym.environments.base import Environment, Session, Split
from fovea_gym.errors import describe_error, first_line
from fovea_gym.tools.base import BadResultError, Frame, Picture, TakesCoordinates, Tool, ToolError
from fovea_gym.tools.calls.base import BadCall, CallFormat
from fovea_gym.tools.calls.json_calls import JsonCalls
from fovea_gym.tools.results import ResultLimits, check_arguments, checked_parts
from fovea_gym.types import ImageRef, Message, Score, Task, ToolCall, Turn

MAX_CALLS = 8
"""Maximum calls made in one turn; further calls are answered with an error."""
MAX_ERROR_CHARACTERS = 300
MAX_KEPT_CHARACTERS = 200
"""Maximum characters kept of the text that a call prints."""
_CALL: ContextVar[io.StringIO | None] = ContextVar("call", default=None)
DEMONSTRATED = JsonCalls()
"""The format of calls in demonstrations, independent of the model's format (`demonstrated_call`)."""


def demonstrated_call(name: str, arguments: Mapping[str, object], text: str = "") -> str:
    """A demonstration's answer that calls a tool, with coordinates in thousandths; Fovea rewrites it for the model."""
    return DEMONSTRATED.written(text, [ToolCall(name=name, arguments=arguments)])


class _Router(io.TextIOBase):
    """Standard output that captures the text printed by tool calls, and passes other text to the stream below."""

    def __init__(self, below: TextIO) -> None:
        self.below = below

    def write(self, text: str) -> int:
        call = _CALL.get()
        if call is None:
            return self.below.write(text)
        call.write(text[: max(0, MAX_KEPT_CHARACTERS - call.tell())])
        return len(text)

    def flush(self) -> None:
        self.below.flush()

    def fileno(self) -> int:
        return self.below.fileno()

    def isatty(self) -> bool:
        return self.below.isatty()


class PrintedText:
    """Keeps text that calls print off the console; calls may overlap, in tasks of one loop and in their threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_calls = 0

    @contextmanager
    def of_call(self) -> Iterator[io.StringIO]:
        """Capture the beginning of the text printed within the block, including in `asyncio.to_thread`."""
        kept = io.StringIO()
        token = _CALL.set(kept)
        self._count(1)
        try:
            yield kept
        finally:
            self._count(-1)
            _CALL.reset(token)

    def _count(self, change: int) -> None:
        """Count running calls, and redirect standard output while there are any."""
        with self._lock:
            if self._num_calls == 0:
                sys.stdout = _Router(sys.stdout)
            self._num_calls += change
            if self._num_calls == 0 and isinstance(sys.stdout, _Router):
                sys.stdout = sys.stdout.below


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tool-calling setup of a run: the format of calls, coordinates, limits and warnings."""

    format: CallFormat
    frame: Frame
    limits: ResultLimits
    check_picture: Callable[[ImageRef], object]
    """A function that raises BadRowError for a picture whose shape the model's image processor refuses."""
    warn: Callable[[str], None]
    """A function that is called with one line when a tool fails for the first time."""
    shows_pictures: bool = True
    """False if the model's chat template drops pictures that tools return."""
    printed: PrintedText = field(default_factory=PrintedText)
    warned: set[str] = field(default_factory=set)
    """Names of the tools for which `warn` has been called."""


class WithTools(Environment):
    """An environment whose model may call tools: the environment's tools for a task, then those of the settings."""

    def __init__(
        self, environment: Environment, use: ToolUse, tools: Sequence[Tool] = (), *, max_turns: int | None = None
    ) -> None:
        self._environment = environment
        self._use = use
        self._tools = tuple(tools)
        self.max_turns = environment.max_turns if max_turns is None else max_turns
        self.answer_end = environment.answer_end

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._environment.tasks(split)

    def prompt(self, task: Task) -> Sequence[Message]:
        return self._environment.prompt(task)

    def target(self, task: Task) -> str:
        return self._environment.target(task)

    def tools(self, task: Task) -> Sequence[Tool]:
        return self._with_further(self._environment.tools(task))

    def demonstration(self, task: Task) -> Sequence[str]:
        """The environment's demonstration, with calls and coordinates converted to the model's format and frame."""
        pictures = _pictures_of(task, self.prompt(task), (), self._use.limits)
        tools = {tool.spec.name: tool for tool in self.tools(task)}
        return [self._rewritten(text, tools, pictures) for text in self._environment.demonstration(task)]

    async def open(self, task: Task, seed: int) -> Session:
        inner = await self._environment.open(task, seed)
        own = inner.tools()
        tools = self.tools(task) if own is None else self._with_further(own)
        return ToolSession(inner, task, tools, self._use)

    def _with_further(self, own: Sequence[Tool]) -> Sequence[Tool]:
        frame = self._use.frame
        return [each.in_frame(frame) if isinstance(each, TakesCoordinates) else each for each in (*own, *self._tools)]

    def _rewritten(self, text: str, tools: Mapping[str, Tool], pictures: Sequence[Picture]) -> str:
        calls = [each for each in DEMONSTRATED.parse(text, ()) if isinstance(each, ToolCall)]
        if not calls:
            return text
        for place, call in enumerate(calls):
            if isinstance(tool := tools.get(call.name), TakesCoordinates):
                calls[place] = replace(call, arguments=tool.demonstrated(call.arguments, pictures))
        return self._use.format.written(text.partition("<tool_call>")[0].strip(), calls)


def _pictures_of(task: Task, asked: Sequence[Message], later: Sequence[Message], limits: ResultLimits) -> list[Picture]:
    """The pictures of an episode: those of the task, as its prompt `asked` shows them, then those of later messages."""
    shown = _images_in(asked)
    # a prompt may show reduced copies: tools work on the originals if these match the copies one to one
    refs = task.images if len(task.images) == len(shown) else shown
    pairs = [*zip(refs, shown, strict=True), *((ref, ref) for ref in _images_in(later))]
    return [Picture(ref=ref, open_image=limits.open_image, shown=seen) for ref, seen in pairs]


def _images_in(messages: Sequence[Message]) -> list[ImageRef]:
    return [part for message in messages for part in message.parts if isinstance(part, ImageRef)]


class ToolSession(Session):
    """Session that answers turns with calls by the results; the environment's session answers other turns."""

    def __init__(self, inner: Session, task: Task, tools: Sequence[Tool], use: ToolUse) -> None:
        self._inner = inner
        self._task = task
        self._tools = {tool.spec.name: tool for tool in tools}
        self._use = use

    async def reply(self, turns: Sequence[Turn]) -> Sequence[Message] | None:
        return await self._results(turns) or await self._inner.reply(turns)

    async def score(self, turns: Sequence[Turn]) -> Score | None:
        return await self._inner.score(turns)

    @property
    def has_score(self) -> bool:
        return self._inner.has_score

    async def close(self) -> None:
        await self._inner.close()

    async def _results(self, turns: Sequence[Turn]) -> list[Message]:
        """A message for each call of the last turn, in order; empty if the turn has no calls."""
        found = self._use.format.parse(turns[-1].text, [tool.spec for tool in self._tools.values()])
        if not found:
            return []
        later = [message for turn in turns[1:] for message in turn.messages]
        pictures = _pictures_of(self._task, turns[0].messages, later, self._use.limits)
        made = await asyncio.gather(*(self._result(call, pictures) for call in found[:MAX_CALLS]))
        return [*made, *[failed("", f"at most {MAX_CALLS} calls are made in a turn")] * (len(found) > MAX_CALLS)]

    async def _result(self, call: ToolCall | BadCall, pictures: Sequence[Picture]) -> Message:
        if isinstance(call, BadCall):
            return failed("", call.problem)
        tool = self._tools.get(call.name)
        if tool is None:
            return failed("", f"there is no tool {call.name:.60}; the tools are {', '.join(self._tools)}")
        try:
            parts = await self._called(tool, call, pictures)
        except BadResultError as error:
            self._warn(call.name, str(error).removeprefix(f"{call.name} "))
            return failed(call.name, str(error))
        except ToolError as error:
            return failed(call.name, str(error))
        except Exception as error:  # raised by the tool's code; the model reads the error, and metrics count it
            self._warn(call.name, describe_error(error))
            return failed(call.name, first_line(error))
        return Message(role="tool", tool=call.name, parts=tuple(parts))

    async def _called(self, tool: Tool, call: ToolCall, pictures: Sequence[Picture]) -> list[str | ImageRef]:
        arguments = check_arguments(call.arguments, tool.spec)
        with self._use.printed.of_call() as printed:
            parts = await tool.call(arguments, pictures)
        if text := printed.getvalue().strip():
            self._warn(call.name, f"printed {text.splitlines()[0]!r:.100}, which the model does not see; return it")
        checked = await asyncio.to_thread(checked_parts, parts, call.name, self._use.limits)
        for part in checked:
            if isinstance(part, ImageRef):
                if not self._use.shows_pictures:
                    raise BadResultError(f"{call.name} returned a picture, which the model's chat template leaves out")
                self._use.check_picture(part)
        return checked

    def _warn(self, tool: str, problem: str) -> None:
        if tool not in self._use.warned:
            self._use.warned.add(tool)
            self._use.warn(f"tool {tool} {problem} (reported once)")


def failed(tool: str, problem: str) -> Message:
    """The message that answers a failed call."""
    text = " ".join(problem.split())[:MAX_ERROR_CHARACTERS]
    return Message(role="tool", tool=tool, parts=(f"Error: {text}",), failed=True)
