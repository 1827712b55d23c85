"""Calls written and read in the formats of Qwen3-VL, Qwen3.5 and Gemma 4, against transformers and real templates."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response
from trl.chat_template_utils import gemma4_template, qwen3_5_template, qwen3_template

from fovea.errors import ModelError
from fovea.models.render import as_listed
from fovea.models.tool_calls import format_of, reads_tools
from fovea_gym.tools.calls.base import BadCall
from fovea_gym.types import ToolCall, ToolSpec
from gym_tests.tables import table
from tests.utils.tool_calls.fuzzed import TEMPLATES, answer_by_template, fuzzed, template

NUM_FUZZED = 500
RESPONSES: dict[str, Any] = {"json": qwen3_template, "xml": qwen3_5_template, "gemma": gemma4_template}
"""transformers' parsers of whole answers."""
ENDS = {"json": "<|im_end|>\n", "xml": "<|im_end|>\n", "gemma": "<|tool_response>"}
PREFIXES = {"json": "<|im_start|>assistant\n", "xml": "<|im_start|>assistant\n", "gemma": "<|turn>model\n"}
PROPERTIES: dict[str, Any] = {"side": {"type": "number"}, "unit": {"type": "string"}, "exact": {"type": "boolean"}}
PROPERTIES["box"] = {"anyOf": [{"type": "array"}, {"type": "null"}]}
AREA = ToolSpec(name="area", description="", parameters={"properties": PROPERTIES})


@table("name", TEMPLATES)
def test_fuzzed_calls_are_written_as_by_the_template_and_read_as_by_transformers(name: str) -> None:
    calls_of = format_of(template(TEMPLATES[name]), "a model")
    assert calls_of.name == name
    for seed in range(NUM_FUZZED):
        tools, text, calls = fuzzed(seed)
        if name == "gemma":
            text = ""  # this template writes the text after the calls
        written = calls_of.written(text, calls)
        assert written + ENDS[name] == answer_by_template(TEMPLATES[name], text, calls), seed
        assert list(calls_of.parse(written, tools)) == calls, seed
        listed = [as_listed(tool) for tool in tools]
        read: Any = parse_response(written, RESPONSES[name], prefix=PREFIXES[name], tools=listed)
        theirs = [(each["function"]["name"], each["function"]["arguments"]) for each in read["tool_calls"]]
        assert theirs == [(call.name, call.arguments) for call in calls], seed


@table(
    ("name", "text", "arguments"),
    [
        ("json", '<tool_call>{"name": "area", "arguments": {"side": 2}}', {"side": 2}),
        ("json", '<tool_call>{"name": "area"}</tool_call>', {}),
        ("json", 'a <tool_call>\n{"arguments": {"unit": "<b>"}, "name": "area"}\n</tool_call> b', {"unit": "<b>"}),
        ("xml", "<tool_call><function=area><parameter=side>2</parameter></function></tool_call>", {"side": 2}),
        ("xml", "<tool_call>\n<function=area><parameter=unit>\n2\n</parameter></function></tool_call>", {"unit": "2"}),
        ("xml", "<tool_call><function=area><parameter=exact>True</parameter></function></tool_call>", {"exact": True}),
        ("xml", "<tool_call><function=area><parameter=box>None</parameter></function></tool_call>", {"box": None}),
        ("xml", "<tool_call><function=area><parameter=box>[1, 2]</parameter></function></tool_call>", {"box": [1, 2]}),
        ("xml", "<tool_call><function=area><parameter=side>wide</parameter></function></tool_call>", {"side": "wide"}),
        ("gemma", '<|tool_call>call:area{ side : 2.5 , unit:<|"|>a,}<|"|>}<tool_call|>', {"side": 2.5, "unit": "a,}"}),
        ("gemma", "<|tool_call>call:area{unit:cm,exact:true,box:[[{}]]}", {"unit": "cm", "exact": True, "box": [[{}]]}),
        ("gemma", '<|tool_call>call:area{<|"|>side<|"|>:1e3}<tool_call|>', {"side": 1000.0}),
    ],
)  # fmt: skip
def test_calls_are_read_as_models_write_them(name: str, text: str, arguments: dict[str, object]) -> None:
    found = format_of(template(TEMPLATES[name]), "a model").parse(text, [AREA])
    assert found == [ToolCall(name="area", arguments=arguments)]


@table(
    ("name", "text", "says"),
    [
        ("json", "<tool_call>zoom</tool_call>", "is not valid JSON (Expecting value"),
        ("json", '<tool_call>{"name": "area", "arguments": {"side": NaN}}</tool_call>', "NaN is no JSON number"),
        ("json", '<tool_call>{"arguments": {}}</tool_call>', "has no name"),
        ("json", '<tool_call>["area"]</tool_call>', "has no name"),
        ("json", '<tool_call>{"name": "area", "arguments": [2]}</tool_call>', "are not an object"),
        ("json", "<tool_call>" + "[" * 100_000, "is not valid JSON"),
        ("xml", '<tool_call>{"name": "area"}</tool_call>', "has no <function=NAME>"),
        ("xml", "<tool_call><function=area>side=2</function></tool_call>", "text outside <parameter> tags"),
        ("xml", "<tool_call><function=area><parameter=side>2</function></tool_call>", "outside <parameter> tags"),
        ("gemma", "<|tool_call>area{}<tool_call|>", "has no name"),
        ("gemma", "<|tool_call>call:area{side}<tool_call|>", "cannot be read"),
        ("gemma", '<|tool_call>call:area{unit:<|"|>cm}<tool_call|>', "cannot be read"),
        ("gemma", "<|tool_call>call:area{side:2} and<tool_call|>", "cannot be read"),
        ("gemma", "<|tool_call>call:area" + "{a:" * 100_000, "cannot be read"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_and_the_right_form(name: str, text: str, says: str) -> None:
    (found,) = format_of(template(TEMPLATES[name]), "a model").parse(text, [AREA])
    assert isinstance(found, BadCall)
    assert says in found.problem
    assert "; write <" in found.problem
    assert (len(found.problem) < 300, "\n" in found.problem) == (True, False)


def test_an_answer_without_a_call_and_a_thought_of_one_call_nothing() -> None:
    for name in TEMPLATES:
        assert not format_of(template(TEMPLATES[name]), "a model").parse(r"It is \boxed{3}.", [AREA])
    thought = "<tool_call>x</tool_call> I will not.</think>It is 3."
    assert not format_of(template("qwen3_5_think.jinja"), "a model").parse(thought, [AREA])


@table(
    ("file", "name", "has_tools"),
    [
        ("qwen3.jinja", "json", True),
        ("qwen3_5_think.jinja", "xml", True),
        ("gemma4.jinja", "gemma", True),
        ("gemma4_v2.jinja", "gemma", True),
        ("qwen2_5_vl.jinja", "json", False),
        ("gemma3.jinja", "json", False),
        ("idefics3.jinja", "json", False),
        ("smolvlm.jinja", "json", False),
    ],
)
def test_the_format_is_known_by_the_template(file: str, name: str, has_tools: bool) -> None:
    assert (format_of(template(file), "a model").name, reads_tools(template(file))) == (name, has_tools)


def test_a_template_with_calls_in_another_format_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"model.path=my/llama: its chat template writes tool calls in a format"):
        format_of(template("llama3_2.jinja"), "my/llama")
