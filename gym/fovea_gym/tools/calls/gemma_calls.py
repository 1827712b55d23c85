"""Calls as Gemma 4 writes them: `<|tool_call>call:NAME{key:<|"|>text<|"|>,key:3}<tool_call|>`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from fovea_gym.tools.calls.base import BadCall, blocks
from fovea_gym.types import ToolCall, ToolSpec

OPENING, CLOSING, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
RESULT = "<|tool_response>"
"""Special token by which a model ends its calls, and with which the result begins."""
MARKS = (OPENING, CLOSING, QUOTE)
"""Special tokens that a model draws to write a call."""
FORM = f"{OPENING}call:NAME{{argument:{QUOTE}text{QUOTE},number:3}}{CLOSING}"
_HEAD = re.compile(r"\s*call:([\w.-]+)(?=\{)")
_BARE = re.compile(r"[^,\]}]*")
_KEY = re.compile(rf"(?:{re.escape(QUOTE)}(.*?){re.escape(QUOTE)}|([^:,{{}}\[\]]*)):", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class GemmaCalls:
    """CallFormat of Gemma 4."""

    name = "gemma"

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Sequence[ToolCall | BadCall]:
        return [_call(block) for block in blocks(text, OPENING, CLOSING)]

    def written(self, text: str, calls: Sequence[ToolCall]) -> str:
        return text + "".join(f"{OPENING}call:{call.name}{_written(call.arguments)}{CLOSING}" for call in calls)


def is_written_by(template: str) -> bool:
    """True if a chat template writes calls in this format."""
    return f"{OPENING}call:" in template


def awaits_result(end: str) -> bool:
    """True if an answer that ends with this token goes on after the results of its calls."""
    return end in (RESULT, CLOSING)


def calling(name: str) -> dict[str, Any]:
    """Message of the chat template with a call of this name."""
    # without an id the template would name all results after it
    return {"role": "assistant", "tool_calls": [{"id": name, "function": {"name": name, "arguments": {}}}]}


def call_of(name: str) -> str:
    """A call without arguments, as written."""
    return GemmaCalls().written("", [ToolCall(name=name, arguments={})])


def _call(block: str) -> ToolCall | BadCall:
    head = _HEAD.match(block)
    if head is None:
        return BadCall(problem=f"the tool call has no name; write {FORM}")
    reader = _Reader(block, head.end())
    try:
        arguments = reader.value()
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or block[reader.place :].strip():
        return BadCall(problem=f"the arguments of the call of {head[1]:.60} cannot be read; write {FORM}")
    return ToolCall(name=head[1], arguments=arguments)


class _Reader:
    """Reads values from a place in a text on; ValueError where there is none."""

    def __init__(self, text: str, place: int) -> None:
        self._text = text
        self.place = place

    def value(self) -> object:
        self._skip_spaces()
        if self._take("{"):
            return dict(self._items("}", self._pair))
        if self._take("["):
            return self._items("]", self.value)
        if self._take(QUOTE):
            end = self._text.index(QUOTE, self.place)
            text, self.place = self._text[self.place : end], end + len(QUOTE)
            return text
        return self._bare()

    def _items(self, closing: str, read: Any) -> list[Any]:
        items: list[Any] = []
        self._skip_spaces()
        while not self._take(closing):
            if items and not self._take(","):
                raise ValueError(f"no comma at {self.place}")
            items.append(read())
            self._skip_spaces()
        return items

    def _pair(self) -> tuple[str, object]:
        self._skip_spaces()
        key = _KEY.match(self._text, self.place)
        if key is None:
            raise ValueError(f"no key at {self.place}")
        self.place = key.end()
        return (key[2].strip() if key[1] is None else key[1]), self.value()

    def _bare(self) -> object:
        """A number, a word, or else a text that lacks its quotes."""
        found = _BARE.match(self._text, self.place)
        text = found[0].strip() if found else ""
        if not found or not text:
            raise ValueError(f"no value at {self.place}")
        self.place = found.end()
        for number in (int, float):
            with suppress(ValueError):
                return number(text)
        return _WORDS.get(text.lower(), text)

    def _take(self, mark: str) -> bool:
        is_there = self._text.startswith(mark, self.place)
        self.place += len(mark) if is_there else 0
        return is_there

    def _skip_spaces(self) -> None:
        while self._text[self.place : self.place + 1].isspace():
            self.place += 1


def _written(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        # in the order of the chat template
        keys = sorted(value, key=str.lower)
        return "{" + ",".join(f"{key}:{_written(value[key])}" for key in keys) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    return str(value)
