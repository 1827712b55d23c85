"""NeMo-Gym environments: a resources server that provides tools and rewards, over its published HTTP protocol.

A row of a data set holds an OpenAI Responses API request with messages and tools. An episode is a session on the
server, identified by its cookies: `/seed_session` opens it, a tool call is a POST to `/NAME_OF_THE_TOOL`, and `/verify`
receives the row with the whole conversation and returns the reward. The package `nemo-gym` is not needed: Fovea
replaces its agent and model servers.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeGuard

from fovea_gym.adapters.own_score import ScoredBySession
from fovea_gym.environments.base import Environment, Session, Split
from fovea_gym.environments.dataset_prompts import bad_row, checked_text
from fovea_gym.environments.file_splits import FileSplits
from fovea_gym.errors import DataError, first_line
from fovea_gym.graders.base import NoScoreError
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.rows import Rows
from fovea_gym.settings.environments import NemoGymEnvironment
from fovea_gym.tools.base import Picture, Tool, ToolError
from fovea_gym.types import ImageRef, Message, Role, Score, Task, ToolSpec, Turn
from fovea_gym.utils.http_json import CallBounds, CallError, JsonServer

REQUEST = "responses_create_params"
"""Name of the column that holds the request."""
MAX_ANSWER_BYTES = 16 << 20
MAX_RESULT_CHARACTERS = 20_000
_ROLES: Mapping[object, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CALL = re.compile(r"<\|?tool_call\|?>")
"""Start of a tool call in the texts of the model families whose formats are known (`fovea_gym.tools.calls`)."""
Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ImageUrl:
    """An image among the parts of a message: a data URI, an address, or a path relative to the data file."""

    url: str


class NemoGym(Environment):
    """The environment `nemo_gym`, whose settings are `NemoGymEnvironment`."""

    graders = (ScoredBySession("nemo_gym"),)
    has_demonstrations = False

    def __init__(self, config: NemoGymEnvironment, access: RowAccess) -> None:
        self._config = config
        self.max_turns = config.max_turns
        self._splits = FileSplits(config, access, _check)

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._splits.tasks(split, partial(_task, split))

    def prompt(self, task: Task) -> Sequence[Message]:
        left = iter(task.images)
        return [
            Message(role=role, parts=tuple(next(left) if isinstance(part, ImageUrl) else part for part in parts))
            for role, parts in messages_of(task.row, task.id)
        ]

    def target(self, task: Task) -> str:
        """An empty text, since only the server knows which answers succeed."""
        return ""

    def tools(self, task: Task) -> Sequence[Tool]:
        """The tools that a row's prompt lists; an episode calls those of its session."""
        return [GymTool(spec=spec) for spec in specs_of(task.row, task.id)]

    async def open(self, task: Task, seed: int) -> GymSession:
        """Open a session on the server for a row; NoScoreError if that fails. The server does not take the seed."""
        limit = self._config.session.deadline_seconds
        bounds = CallBounds(timeout_seconds=limit, calls_at_once=8, max_reply_bytes=MAX_ANSWER_BYTES)
        session = GymSession(JsonServer(self._config.url.rstrip("/"), bounds), task)
        try:
            await session.begin()
        except BaseException:
            await session.close()
            raise
        return session


class GymSession(Session):
    """One session on the server, which scores the conversation."""

    def __init__(self, server: JsonServer, task: Task) -> None:
        self._server = server  # its HTTP client keeps the cookies of the session
        self._task = task
        self._made: list[dict[str, str]] = []

    async def begin(self) -> None:
        await self._asked("/seed_session", self._task.row)

    def tools(self) -> Sequence[Tool]:
        """The tools of the row, called in this session."""
        return [GymTool(spec=spec, session=self) for spec in specs_of(self._task.row, self._task.id)]

    async def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Call a tool and return its output as text; the model is also given the text of an HTTP error."""
        made = {"name": name, "arguments": json.dumps(arguments), "output": ""}
        self._made.append(made)  # before any await: calls begin in the order in which the model wrote them
        try:
            # in the JSON form that the server's framework writes
            output = json.dumps(await self._server.post(f"/{name}", arguments), separators=(",", ":"))
        except CallError as error:
            if error.status is None:
                raise ToolError(f"the server gave no answer ({error})") from error
            output = str(error)
        made["output"] = output[:MAX_RESULT_CHARACTERS]
        return made["output"]

    async def reply(self, turns: Sequence[Turn]) -> Sequence[Message] | None:
        """None: an answer without a call ends the episode."""
        return None

    async def score(self, turns: Sequence[Turn]) -> Score:
        """The reward that `/verify` returns; its parts are the values of the objectives, if there are several."""
        answer = await self._asked("/verify", {**self._task.row, "response": self._response(turns)})
        reward = answer.get("reward") if isinstance(answer, Mapping) else None
        if not _is_finite(reward):
            raise NoScoreError(f"at {self._server.url} returned the reward {reward!r:.60}, which is not a number")
        objectives = answer.get("reward_components")
        found = objectives.items() if isinstance(objectives, Mapping) else ()
        parts = {str(name)[:60]: float(value) for name, value in islice(found, 20) if _is_finite(value)}
        return Score(reward=float(reward), accuracy=min(max(float(reward), 0.0), 1.0), parts=parts)

    async def close(self) -> None:
        await self._server.close()

    async def _asked(self, path: str, body: Mapping[str, object]) -> Any:
        try:
            return await self._server.post(path, body)
        except CallError as error:
            raise NoScoreError(f"at {self._server.url} failed in {path} ({error})") from error

    def _response(self, turns: Sequence[Turn]) -> dict[str, object]:
        """The conversation after the prompt, in the format of a Responses API response."""
        made, output = iter(self._made), list[dict[str, object]]()
        for place, turn in enumerate(turns):
            replied = turns[place + 1].messages if place + 1 < len(turns) else ()
            num_calls = sum(message.role == "tool" and not message.failed for message in replied)
            output += [_answer(turn.text, place), *_calls(islice(made, num_calls), place)]
        return {
            **{"id": self._task.id, "object": "response", "created_at": 0, "model": "fovea", "output": output},
            **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": _request(self._task.row, "")["tools"]},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GymTool:
    """A tool of the server; only with a session can it be called."""

    spec: ToolSpec
    session: GymSession | None = None

    async def call(self, arguments: Mapping[str, object], _pictures: Sequence[Picture]) -> Sequence[str | ImageRef]:
        assert self.session is not None, "episodes call the tools of their session"
        return (await self.session.call(self.spec.name, arguments),)


def messages_of(row: Row, where: str) -> list[tuple[Role, list[str | ImageUrl]]]:
    """Roles and parts of the messages of a row; for malformed ones, BadRowError that names `where`."""
    given = _request(row, where).get("input")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(messages, list) or not messages:
        raise bad_row(where, f"{REQUEST}.input is not a text or a list of messages", "prompt_kind")
    read = [_message(message, where) for message in messages]
    if read[-1][0] != "user":
        raise bad_row(where, f"the last message is {read[-1][0]}, but a prompt must end with the user's", "prompt_role")
    return read


def specs_of(row: Row, where: str) -> list[ToolSpec]:
    """The tools of a row; BadRowError for a tool that is not a function with a name."""
    specs = list[ToolSpec]()
    for tool in _request(row, where)["tools"]:
        match tool:
            case {"type": "function", "name": str() as name} if _TOOL_NAME.fullmatch(name):
                parameters = tool.get("parameters") or {"type": "object", "properties": {}}
                specs.append(ToolSpec(name=name, description=tool.get("description") or "", parameters=parameters))
            case _:
                raise bad_row(where, f"{json.dumps(tool)[:80]} is not a function with a name", "tool_kind")
    return specs


def _check(rows: Rows, setting: str) -> None:
    if REQUEST not in rows.columns:
        raise DataError(
            f"{setting}: there is no column {REQUEST} (the columns are {', '.join(rows.columns)[:200]}); give rows in "
            "NeMo-Gym's format"
        )


def _task(split: Split, rows: Rows, index: int, kind: str) -> Task:
    row, where = rows[index], rows.where(index)
    messages = messages_of(row, where)
    specs_of(row, where)
    try:
        json.dumps(row)
    except (TypeError, ValueError) as error:
        raise bad_row(where, f"the row is not JSON ({first_line(error)}); give JSONL files", "row_kind") from error
    urls = [part.url for _, parts in messages for part in parts if isinstance(part, ImageUrl)]
    images = rows.image_refs(index, *urls)
    question = "\n".join(part for part in messages[-1][1] if isinstance(part, str))
    return Task(id=f"{split}/{index}", question=question, answer="", images=images, kind=kind, row=row)


def _request(row: Row, where: str) -> dict[str, Any]:
    request = row.get(REQUEST)
    if not isinstance(request, Mapping) or not isinstance(request.get("tools") or [], list):
        raise bad_row(where, f"{REQUEST} is not a request with input and tools", "prompt_kind")
    return {**request, "tools": request.get("tools") or []}


def _message(message: object, where: str) -> tuple[Role, list[str | ImageUrl]]:
    match message:
        case {"role": str() as role, "content": str() | list() as content} if role in _ROLES:
            parts = [content] if isinstance(content, str) else content
            return _ROLES[role], [_part(part, where) for part in parts]
    raise bad_row(where, f"{json.dumps(message)[:80]} is not a message with role and content", "prompt_kind")


def _part(part: Any, where: str) -> str | ImageUrl:
    match part:
        case str() | {"type": "input_text" | "output_text" | "text", "text": str()}:
            return checked_text(part if isinstance(part, str) else part["text"], where)
        case {"type": "input_image", "image_url": str() as url} | {
            "type": "image_url",
            "image_url": {"url": str() as url},
        }:
            return ImageUrl(url)
    raise bad_row(where, f"{json.dumps(part)[:80]} is not a text or an image", "prompt_kind")


def _answer(text: str, place: int) -> dict[str, object]:
    """An answer as an item of the output, without the text of its tool calls."""
    words = _CALL.split(text, maxsplit=1)[0].strip()
    content: list[dict[str, object]] = [{"type": "output_text", "text": words, "annotations": []}]
    return {"type": "message", "id": f"msg_{place}", "role": "assistant", "status": "completed", "content": content}


def _calls(made: Iterator[Mapping[str, str]], place: int) -> Iterator[dict[str, object]]:
    for number, call in enumerate(made):
        id_of_call = f"call_{place}_{number}"
        given = {"name": call["name"], "arguments": call["arguments"]}
        yield {"type": "function_call", "call_id": id_of_call, "status": "completed", **given}
        answered = {"id": f"out_{place}_{number}", "status": "completed", "output": call["output"]}
        yield {"type": "function_call_output", "call_id": id_of_call, **answered}


def _is_finite(value: object) -> TypeGuard[float]:
    # compared without conversion, since an int may be too large for a float
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
