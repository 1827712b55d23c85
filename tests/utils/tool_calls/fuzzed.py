"""Random tools and calls of them, and the real chat templates that write them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from fovea_gym.types import ToolCall, ToolSpec

TEMPLATES = {"json": "qwen3_vl.jinja", "xml": "qwen3_5_nothink.jinja", "gemma": "gemma4_v5.jinja"}
"""A family's template for each format, as TRL keeps them."""
WORDS = (
    *("zoom", "rot", "x", "Größe", "雪", "a b", 'say "hi"', "back\\slash", "two\nlines"),
    *("{brace}", "[1, 2]", "5", "é'"),
)
SCALARS = tuple({"type": name} for name in ("string", "integer", "number", "boolean"))
ARRAYS = tuple({"type": "array", "items": {"type": name}} for name in ("number", "string"))
TYPES: tuple[dict[str, Any], ...] = (*SCALARS, *ARRAYS, {"type": "object"})


@cache
def template(name: str) -> str:
    pytest.importorskip("trl")  # the environments of other versions of torch are without it
    return files("trl").joinpath("chat_templates", name).read_text(encoding="utf-8")


def fuzzed(seed: int) -> tuple[list[ToolSpec], str, list[ToolCall]]:
    """Tools, the text before the calls and one to three calls."""
    rng = random.Random(seed)
    tools = [_tool(rng, number) for number in range(rng.randint(1, 4))]
    calls = [_call(rng, rng.choice(tools)) for _ in range(rng.randint(1, 3))]
    return tools, rng.choice(["", "I look closer.", "First: a box.\nThen it."]), calls


def _tool(rng: random.Random, number: int) -> ToolSpec:
    names = rng.sample(["box", "Point", "factor", "label", "flag", "image_index"], rng.randint(0, 5))
    properties = {name: {**rng.choice(TYPES), "description": f"The {name}."} for name in names}
    parameters = {"type": "object", "properties": properties, "required": names[:1]}
    return ToolSpec(name=f"tool_{number}", description="It's a tool.", parameters=parameters)


def _call(rng: random.Random, tool: ToolSpec) -> ToolCall:
    properties: Any = tool.parameters["properties"]
    return ToolCall(name=tool.name, arguments={name: _value(rng, schema) for name, schema in properties.items()})


def _value(rng: random.Random, schema: dict[str, Any]) -> object:
    match schema["type"]:
        case "string":
            return " ".join(rng.choices(WORDS, k=rng.randint(1, 3)))
        case "integer":
            return rng.randint(-1000, 1000)
        case "number":
            # no whole numbers: parsers disagree on whether 2.0 is 2
            return rng.randint(-500, 500) + 0.25
        case "boolean":
            return rng.random() < 0.5
        case "array":
            return [_value(rng, schema["items"]) for _ in range(rng.randint(0, 4))]
    return {"k": rng.randint(0, 9), "nested": {"s": rng.choice(WORDS), "l": [1, [2.5, "x"]]}, "on": True, "none": None}


ASKED = [{"role": "user", "content": "Where is it?"}]


def answer_by_template(name: str, text: str, calls: Sequence[ToolCall]) -> str:
    """An answer with calls as transformers writes it by the chat template, from the generation prompt to its end."""
    made = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    whole = _rendered(name, [*ASKED, {"role": "assistant", "content": text, "tool_calls": made}], False)
    assert whole.startswith(_prompt(name)), name
    return whole.removeprefix(_prompt(name))


@cache
def _prompt(name: str) -> str:
    return _rendered(name, ASKED, True)


def _rendered(name: str, chat: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    settings: Any = {"chat_template": template(name), "add_generation_prompt": add_generation_prompt, "bos_token": ""}
    return str(render_jinja_template([chat], **settings)[0][0])
