"""Tools and their results in messages, for chat templates with and without a place for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from fovea.types import ImageRef, Message, ToolSpec
from fovea.utils.shown_text import without_marks
from fovea.utils.tool_calls.json_calls import CLOSING, OPENING

SYSTEM_PROMPT = "You are a helpful assistant."
"""System prompt of Qwen2.5-VL's chat template, which leaves it out where there is a system message."""
# the words that Qwen's text models are trained with
LIST = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within {opening}{closing} XML tags:
{opening}
{{"name": <function-name>, "arguments": <args-json-object>}}
{closing}"""


def as_listed(tool: ToolSpec) -> dict[str, Any]:
    """A tool as chat templates and servers take it."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def with_tool_list(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
    """The messages with the tools in the system message, for a chat template that does not read `tools`."""
    listed = "\n".join(json.dumps(as_listed(tool), ensure_ascii=False) for tool in tools)
    text = LIST.format(tools=listed, opening=OPENING, closing=CLOSING)
    if messages and messages[0].role == "system":
        first, *others = messages
        return [replace(first, parts=(*first.parts, f"\n\n{text}")), *others]
    return [Message(role="system", parts=(f"{SYSTEM_PROMPT}\n\n{text}",)), *messages]


def with_results_of_user(messages: Sequence[Message]) -> list[Message]:
    """The messages with results of tools as messages of the user, one for those in a row.

    For a chat template without the role `tool`; some of these insist on turns of user and assistant.
    """
    found: list[Message] = []
    for is_result, group in groupby(messages, lambda message: message.role == "tool"):
        run = list(group)
        found += [Message(role="user", parts=tuple(_result_parts(run)))] if is_result else run
    return found


def _result_parts(results: Sequence[Message]) -> Iterator[str | ImageRef]:
    for number, result in enumerate(results):
        yield "\n<tool_response>\n" if number else "<tool_response>\n"
        yield from result.parts
        yield "\n</tool_response>"


def without_special_tokens(messages: Sequence[Message], marks: Sequence[str]) -> list[Message]:
    """The messages with a space in each special token that a tool has returned: a web page may hold some."""
    return [replace(each, parts=_harmless(each, marks)) if each.role == "tool" else each for each in messages]


def _harmless(message: Message, marks: Sequence[str]) -> tuple[str | ImageRef, ...]:
    return tuple(without_marks(part, marks) if isinstance(part, str) else part for part in message.parts)
