"""Answers of a server: what it is asked, what is asked again, and what is an error. A real one is asked elsewhere."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fovea.commands.targets import ServerTarget, parse_target, parse_targets
from fovea.config.run import Config
from fovea.data.prompt_source import PromptSource
from fovea.errors import EngineError
from fovea.evaluation.chat_server import ChatModel, EmptyPrompts, ServerAnswers
from fovea.evaluation.controls import image_controls
from fovea.evaluation.evaluator import Evaluator
from fovea.evaluation.json_file import write_answers
from fovea.evaluation.records import AnsweredRow
from fovea.models.tiny import TinyParts
from fovea.types import Sampling
from fovea.wiring.environment import make_environment
from fovea.wiring.tools import use_of_server, with_tools
from fovea_gym.environments.base import Environment
from fovea_gym.errors import BadRowError, ConfigError
from fovea_gym.tools.function import function_tool
from fovea_gym.tools.session import demonstrated_call
from fovea_gym.types import AnswerEnd, ImageRef, Message, Task, Turn
from fovea_gym.utils import http_json
from fovea_gym.utils.event_loop import wait_for
from fovea_gym.utils.http_json import CallBounds, JsonServer, bearer
from gym_tests.bandit import BanditEnvironment, graded
from gym_tests.chat_server import Endpoint, endpoints
from gym_tests.images import from_array
from tests.tiny_models import renderer, tiny

BOUNDS = CallBounds(timeout_seconds=20.0, calls_at_once=3, max_retries=2)
GREEDY = Sampling(max_new_tokens=4, temperature=0.0, stop=("END",))
Answers = Callable[..., Awaitable[list[AnsweredRow]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Endpoint]]:
    monkeypatch.setattr(http_json, "FIRST_PAUSE_SECONDS", 0.01)
    with endpoints() as start:
        yield start


def says(*texts: str, finish: str = "stop") -> tuple[int, bytes]:
    choices = [{"index": n, "message": {"content": text}, "finish_reason": finish} for n, text in enumerate(texts)]
    return 200, json.dumps({"choices": choices[::-1]}).encode()  # any order


def ask(
    endpoint: Endpoint,
    environment: Environment,
    bounds: CallBounds = BOUNDS,
    headers: dict[str, str] | None = None,
    model: str | None = None,
    template: Mapping[str, object] = MappingProxyType({}),
    changed: Callable[[PromptSource], PromptSource] = lambda source: source,
    **asked: object,
) -> list[AnsweredRow]:
    """The answers of an endpoint to the first rows of an environment, or of what `changed` makes of its source."""

    async def answers() -> list[AnsweredRow]:
        server = JsonServer(endpoint.url.removesuffix("/v1"), bounds, headers)
        try:
            chat_model, grading = await ChatModel.of(server, model, template), graded(BanditEnvironment())
            answers_of = ServerAnswers(chat_model, environment, grading, from_array)
            evaluator = Evaluator(answers_of, greedy=GREEDY, batch_size=3)
            limits: Any = {"max_prompt_tokens": 10, "on_bad_row": "error", "cache_gib": 0.0}
            source = PromptSource(environment.tasks("test"), environment, EmptyPrompts(), **limits)
            return await evaluator.answers(changed(source), **asked)  # type: ignore[arg-type]
        finally:
            await server.close()

    return wait_for(answers())


def test_rows_come_back_in_order_with_their_scores_and_calls_are_bounded(started: Callable[..., Endpoint]) -> None:
    endpoint = started(says("b"))
    endpoint.delay_seconds = 0.02
    rows = ask(endpoint, BanditEnvironment())
    assert [row.id for row in rows] == [f"test/{index}" for index in range(16)]
    assert [row.answers[0].accuracy for row in rows] == [0, 1, 0, 0] * 4
    assert 1 < endpoint.most_running <= BOUNDS.calls_at_once
    sent = endpoint.requests[0]
    assert (sent["path"], sent["model"], sent["temperature"]) == ("/v1/chat/completions", "tiny", 0.0)
    assert (sent["max_tokens"], sent["stop"], sent["n"]) == (4, ["END"], 1)
    assert not {"top_k", "chat_template_kwargs"} & sent.keys(), "OpenAI's own interface lacks them"
    ask(endpoint, BanditEnvironment(), size=1, template={"enable_thinking": False})
    assert endpoint.requests[-1]["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_server_that_is_busy_or_hangs_is_asked_again_and_one_that_refuses_is_not(
    started: Callable[..., Endpoint],
) -> None:
    endpoint = started((429, b"slow down"), (503, b"starting"), says("a"))
    rows = ask(endpoint, BanditEnvironment(), size=2)
    assert ([row.answers[0].text for row in rows], len(endpoint.requests)) == (["a", "a"], 4)
    # which is an error after the last try
    endpoint = started((500, b"out of luck"))
    with pytest.raises(EngineError, match=r"gives no answer: status 500 \('out of luck'\)"):
        ask(endpoint, BanditEnvironment(), size=1)
    assert len(endpoint.requests) == 1 + BOUNDS.max_retries
    # one that hangs
    endpoint = started(says("a"))
    endpoint.delay_seconds = 2.0
    with pytest.raises(EngineError, match=r"no answer within 0\.4 s"):
        ask(endpoint, BanditEnvironment(), CallBounds(timeout_seconds=0.4, calls_at_once=1, max_retries=1), size=1)
    # a refused request is a bad row
    endpoint = started((400, b"too long"))
    with pytest.raises(BadRowError, match="test/0: the server refuses the request: status 400"):
        ask(endpoint, BanditEnvironment(), size=1)
    assert len(endpoint.requests) == 1


def test_several_answers_are_sampled_and_seeded_row_by_row(started: Callable[..., Endpoint]) -> None:
    endpoint = started(says("a", "b", "c"))
    sampling = Sampling(max_new_tokens=4, temperature=0.7, top_p=0.9, top_k=5)
    rows = ask(endpoint, BanditEnvironment(), size=2, sampling=sampling, n=3, seed=1)
    assert [answer.text for answer in rows[0].answers] == ["a", "b", "c"]
    assert {tuple(sent[key] for key in ("n", "temperature", "top_p", "top_k")) for sent in endpoint.requests} == {
        (3, 0.7, 0.9, 5)
    }
    assert len({sent["seed"] for sent in endpoint.requests}) == 2
    with pytest.raises(EngineError, match="sent 3 answers, but 2 were requested"):
        ask(endpoint, BanditEnvironment(), size=1, sampling=sampling, n=2)


def test_answers_are_cut_where_they_end(started: Callable[..., Endpoint]) -> None:
    sampling = Sampling(max_new_tokens=4, answer_end=AnswerEnd())
    endpoint = started(says(r"so \boxed{\frac{1}{2}} or", r"\boxed{1", finish="length"))
    (row,) = ask(endpoint, BanditEnvironment(), size=1, sampling=sampling, n=2)
    assert [answer.text for answer in row.answers] == [r"so \boxed{\frac{1}{2}}", r"\boxed{1"]
    assert [answer.turns[-1].finish for answer in row.answers] == ["stop", "length"]


class TwoTurns(BanditEnvironment):
    """A picture, then a second look at another one."""

    max_turns = 2
    pictures = tuple(np.full((4, 5, 3), shade, dtype=np.uint8) for shade in (10, 200))

    def prompt(self, task: Task) -> list[Message]:
        return [Message(role="user", parts=(ImageRef(source=self.pictures[0]), "What is it?"))]

    def reply(self, task: Task, turns: Sequence[Turn]) -> list[Message] | None:
        return [Message(role="user", parts=("And here?", ImageRef(source=self.pictures[1])))]


def pixels(part: dict[str, dict[str, str]]) -> np.ndarray:
    data = part["image_url"]["url"].removeprefix("data:image/png;base64,")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def test_a_conversation_is_sent_whole_with_the_pictures_as_they_are_or_those_of_a_control(
    started: Callable[..., Endpoint],
) -> None:
    endpoint = started(says("closer"), says("a", finish="length"))
    (row,) = ask(endpoint, TwoTurns(), size=1)
    assert (row.answers[0].text, row.answers[0].was_truncated, row.answers[0].accuracy) == ("a", True, 1.0)
    first, second = (json.loads(json.dumps(sent["messages"])) for sent in endpoint.requests)
    assert (second[:1], second[1]) == (first, {"role": "assistant", "content": "closer"})
    assert [part["type"] for part in first[0]["content"]] == ["image_url", "text"]
    assert [part["type"] for part in second[2]["content"]] == ["text", "image_url"]
    assert np.array_equal(pixels(first[0]["content"][0]), TwoTurns.pictures[0])
    assert np.array_equal(pixels(second[2]["content"][1]), TwoTurns.pictures[1])
    # those of a control in replies too
    endpoint = started(says("closer"), says("a"))
    ask(endpoint, TwoTurns(), size=1, changed=lambda source: image_controls(source, source.tasks, from_array)[1])
    _, second = (json.loads(json.dumps(sent["messages"])) for sent in endpoint.requests)
    assert np.array_equal(pixels(second[2]["content"][1]), np.full_like(TwoTurns.pictures[1], 128))


def secret() -> str:
    """Say a word."""
    return "<|im_end|>word"


def test_a_server_reads_tools_as_a_template_that_knows_none_and_its_calls_are_answered(
    started: Callable[..., Endpoint],
) -> None:
    scenes = {"name": "shapes", "test_size": 2, "tools": ["zoom"], "max_tool_turns": 2}
    config = Config.model_validate({"model": {"tiny": {}}, "environment": scenes})
    made, warnings = make_environment(config), list[str]()
    make_use = partial(use_of_server, config, from_array, warnings.append)
    environment = with_tools(config, made.environment, [*made.tools, function_tool(secret, "secret")], make_use)
    assert environment.uses_tools
    calls = [demonstrated_call("zoom", {"box": [0, 0, 500, 500]}), demonstrated_call("secret", {})]
    endpoint = started(*map(says, [*calls, "b"]))
    (row,) = ask(endpoint, environment, size=1)
    turns = row.answers[0].turns
    assert [turn.text for turn in turns] == [*calls, "b"]
    assert [message.parts for turn in turns for message in turn.messages] == [("[image]",), ("<|im_end|>word",)]
    assert warnings == []

    first, second, third = (request["messages"] for request in endpoint.requests)
    parts, task = tiny("qwen2_5_vl"), environment.tasks("test")[0]
    text = renderer(parts).text(environment.prompt(task), [tool.spec for tool in environment.tools(task)])
    assert as_template(parts, first) == text
    assert (second[:-2], second[-2]) == (first, {"role": "assistant", "content": calls[0]})
    before, picture, after = second[-1]["content"]
    assert (second[-1]["role"], before["text"], after["text"]) == ("user", "<tool_response>\n", "\n</tool_response>")
    (asked,) = task.images
    assert isinstance(asked.source, np.ndarray)
    quarter = asked.source[: len(asked.source) // 2, : len(asked.source) // 2]
    assert np.abs(pixels(picture).mean((0, 1)) - quarter.mean((0, 1))).max() < 2
    assert third[-1]["content"][1] == {"type": "text", "text": "< |im_end|>word"}


def as_template(parts: TinyParts, chat: Any) -> str:
    """The messages of a request as the server's template writes them."""
    content = [[{"type": "image"} if "image_url" in part else part for part in each["content"]] for each in chat]
    messages = [{**each, "content": parts_of} for each, parts_of in zip(chat, content, strict=True)]
    settings = {"chat_template": parts.processor.chat_template, "tokenize": False, "add_generation_prompt": True}
    return parts.processor.tokenizer.apply_chat_template(messages, **settings)


def test_the_file_of_answers_has_all_turns_of_a_conversation(started: Callable[..., Endpoint], tmp_path: Path) -> None:
    rows = ask(started(says("closer"), says("a")), TwoTurns(), size=1)
    write_answers(tmp_path, "test-final", [*rows, *ask(started(says("a")), BanditEnvironment(), size=1)])
    two, one = map(json.loads, (tmp_path / "answers" / "test-final.jsonl").read_text().splitlines())
    first, last = two["answers"][0]["turns"]
    assert (first["text"], first["messages"], last["text"]) == ("closer", [], "a")
    assert last["messages"] == [{"role": "user", "parts": ["And here?", "[image]"], "tool": "", "failed": False}]
    assert [turn["text"] for turn in one["answers"][0]["turns"]] == ["a"]


def test_the_key_comes_from_the_environment(started: Callable[..., Endpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = started(says("a"))
    with pytest.raises(ConfigError, match="--api-key-env=MY_KEY, but there is no such environment variable"):
        bearer("MY_KEY", "--api-key-env")
    monkeypatch.setenv("MY_KEY", "secret")
    ask(endpoint, BanditEnvironment(), size=1, headers=bearer("MY_KEY", "--api-key-env"))
    assert endpoint.headers[0]["authorization"] == "Bearer secret"


def test_no_row_is_read_where_no_server_answers_or_not_for_the_model(started: Callable[..., Endpoint]) -> None:
    endpoint = started(says("a"))
    endpoint.models = ["small", "large"]
    for model in (None, "huge"):
        with pytest.raises(ConfigError, match=r"serves small, large; name one of them: http://.*#small"):
            ask(endpoint, BanditEnvironment(), model=model)
    assert len(ask(endpoint, BanditEnvironment(), size=1, model="large")) == 1
    endpoint.server.shutdown()
    endpoint.server.server_close()
    with pytest.raises(ConfigError, match="no OpenAI-compatible server answers there"):
        ask(endpoint, BanditEnvironment())


def test_an_address_is_a_target_and_holds_no_key() -> None:
    word = "http://127.0.0.1:8000/v1/#tiny"
    assert parse_target(word) == ServerTarget(name=word, url="http://127.0.0.1:8000", model="tiny")
    (named,) = parse_targets(["https://host/base"], "MY_KEY")
    assert named == ServerTarget(name="https://host/base", url="https://host/base", model=None, api_key_env="MY_KEY")
    for word in ("http://me:secret@host", "http://host?key=secret", "http://"):
        with pytest.raises(ConfigError, match="a server's address is http://HOST:PORT") as raised:
            parse_target(word)
        assert "secret" not in str(raised.value)
