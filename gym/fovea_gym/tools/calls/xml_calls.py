"""Calls with one tag for each argument: Qwen3.5, and Qwen3-Coder before it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fovea_gym.tools.calls.base import BadCall, after_thinking, blocks
from fovea_gym.tools.calls.json_calls import CLOSING, OPENING
from fovea_gym.types import ToolCall, ToolSpec

FORM = "<tool_call><function=NAME><parameter=ARGUMENT>VALUE</parameter></function></tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None, "none": None}
"""Words of JSON and Python: the chat template writes Python's."""


class XmlCalls:
    """CallFormat of `<function=...>` and `<parameter=...>` tags in `<tool_call>` tags."""

    name = "xml"

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Sequence[ToolCall | BadCall]:
        schemas = {tool.name: _properties(tool.parameters) for tool in tools}
        return [_call(block, schemas) for block in blocks(after_thinking(text), OPENING, CLOSING)]

    def written(self, text: str, calls: Sequence[ToolCall]) -> str:
        made = "\n".join(map(_written, calls))
        return f"{text.strip()}\n\n{made}" if text.strip() and made else text.strip() or made


def _call(block: str, schemas: Mapping[str, Mapping[str, Any]]) -> ToolCall | BadCall:
    function = _FUNCTION.fullmatch(block)
    if function is None:
        return BadCall(problem=f"the tool call has no <function=NAME>...</function>; write {FORM}")
    name, body = function[1], function[2].lstrip()
    schema, arguments, place = schemas.get(name, {}), dict[str, object](), 0
    # matched one after the other: a search would begin anew at every blank, which takes quadratic time
    while place < len(body):
        parameter = _PARAMETER.match(body, place)
        if parameter is None:
            return BadCall(problem=f"the call of {name:.60} has text outside <parameter> tags; write {FORM}")
        key, value = parameter.groups()
        arguments[key], place = _value(value, schema.get(key, {})), parameter.end()
    return ToolCall(name=name, arguments=arguments)


def _value(text: str, schema: Mapping[str, Any]) -> object:
    """The value of an argument; text where its schema says so, or where it is not JSON."""
    types = _types(schema)
    if text.lower() in _WORDS and types & {"boolean", "null"}:
        return _WORDS[text.lower()]
    if "string" in types or not types:
        return text
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows."""
    options = [schema, *schema.get("anyOf", ())]
    listed = [option.get("type", ()) for option in options]
    nullable = {"null"} if schema.get("nullable") else set()
    return {name for each in listed for name in ([each] if isinstance(each, str) else each)} | nullable


def _properties(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    properties: Mapping[str, Any] = parameters.get("properties", {})
    return properties


def _written(call: ToolCall) -> str:
    lines = [f"<parameter={name}>\n{_text(value)}\n</parameter>\n" for name, value in call.arguments.items()]
    return f"{OPENING}\n<function={call.name}>\n{''.join(lines)}</function>\n{CLOSING}"


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | tuple) else str(value)
