"""Fuzzed tool calls as vLLM's own parsers read them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from fovea.models.render import as_listed
from fovea_gym.tools.calls.gemma_calls import GemmaCalls
from fovea_gym.tools.calls.json_calls import JsonCalls
from fovea_gym.tools.calls.xml_calls import XmlCalls
from gym_tests.tables import table
from tests.utils.tool_calls.fuzzed import fuzzed

NUM_FUZZED = 500
MARKS = {mark: index for index, mark in enumerate(("<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>"))}


@table(
    ("parser", "calls_of"),
    [("hermes", JsonCalls()), ("qwen3_coder", XmlCalls()), ("gemma4", GemmaCalls())],
)
def test_fuzzed_calls_are_read_as_by_vllm(parser: str, calls_of: Any) -> None:
    tokenizer: Any = SimpleNamespace(
        get_vocab=lambda: MARKS, encode=lambda text, **_: [MARKS.get(text, 9)], decode=lambda ids, **_: ""
    )
    for seed in range(NUM_FUZZED):
        tools, text, calls = fuzzed(seed)
        if parser == "gemma4":
            # vLLM reads numbers within an object whose schema names no properties as texts; transformers does not
            calls = [call for call in calls if not any(isinstance(value, dict) for value in call.arguments.values())]
        written = calls_of.written(text, calls)
        request = ChatCompletionRequest(messages=[], tools=[as_listed(tool) for tool in tools])
        theirs = ToolParserManager.get_tool_parser(parser)(tokenizer, request.tools).extract_tool_calls(
            written, request
        )
        read = [(each.function.name, json.loads(each.function.arguments)) for each in theirs.tool_calls]
        ours = [(each.name, each.arguments) for each in calls_of.parse(written, tools)]
        assert ours == read == [(call.name, call.arguments) for call in calls], seed
