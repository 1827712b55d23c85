"""Calls as JSON objects in `<tool_call>` tags: Qwen3-VL, and Hermes before it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Never

from fovea_gym.tools.calls.base import BadCall, after_thinking, blocks
from fovea_gym.types import ToolCall, ToolSpec

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FORM = '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>'


class JsonCalls:
    """CallFormat of JSON objects in `<tool_call>` tags."""

    name = "json"

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Sequence[ToolCall | BadCall]:
        return [_call(block) for block in blocks(after_thinking(text), OPENING, CLOSING)]

    def written(self, text: str, calls: Sequence[ToolCall]) -> str:
        return "\n".join([*([text] if text else []), *map(_written, calls)])


def _call(block: str) -> ToolCall | BadCall:
    try:
        found: Any = json.loads(block, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return BadCall(problem=f"the tool call is not valid JSON ({error!s:.100}); write {FORM}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return BadCall(problem=f"the tool call has no name; write {FORM}")
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return BadCall(problem=f"the arguments of the call of {found['name']:.60} are not an object; write {FORM}")
    return ToolCall(name=found["name"], arguments=arguments)


def _written(call: ToolCall) -> str:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return f'{OPENING}\n{{"name": "{call.name}", "arguments": {arguments}}}\n{CLOSING}'


def _no_constant(name: str) -> Never:
    raise ValueError(f"{name} is no JSON number")
