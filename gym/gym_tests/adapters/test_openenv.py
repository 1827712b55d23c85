"""Servers of OpenEnv and NeMo-Gym: rows, pictures in every form, actions, tools, rewards and failures.

OpenEnv's server is a stand-in by the published protocol, and the real one where FOVEA_OPENENV_PYTHON names an
interpreter that has the package `openenv` (0.10.0 passes), whose pins do not go with Fovea's.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import websockets.asyncio.server as websockets
from openai.types.responses import Response
from websockets.asyncio.server import ServerConnection

from fovea_gym.adapters import openenv
from fovea_gym.adapters.nemo_gym import NemoGym
from fovea_gym.adapters.openenv import OpenEnv, action_in, parts_of
from fovea_gym.errors import BadRowError, ConfigError, DataError
from fovea_gym.graders.base import NoScoreError
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.images import ImageOpener
from fovea_gym.settings.environments import NemoGymEnvironment, OpenEnvEnvironment
from fovea_gym.tools.base import THOUSANDTHS
from fovea_gym.tools.calls.json_calls import JsonCalls
from fovea_gym.tools.results import ResultLimits
from fovea_gym.tools.session import ToolUse, WithTools
from fovea_gym.types import ImageRef, Message, Score, Task, Turn
from fovea_gym.utils import event_loop
from fovea_gym.utils.http_json import JsonServer
from gym_tests.grading import played
from gym_tests.images import png
from gym_tests.tables import table

LIMIT_SECONDS = 60


@contextmanager
def serving(interpreter: str, script: Path) -> Iterator[str]:
    """The address of the server `SCRIPT PORT`, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([interpreter, str(script), str(port)])
    try:
        end = time.monotonic() + LIMIT_SECONDS
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None, f"{script.name} has ended"
            assert time.monotonic() < end, f"{script.name} does not answer"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


SERVER = Path(__file__).parent / "openenv_server.py"
INTERPRETERS = {"stand-in": sys.executable, "package": os.environ.get("FOVEA_OPENENV_PYTHON", "")}
OPENER = ImageOpener(max_image_mib=1, max_image_megapixels=1)


@pytest.fixture(scope="module", params=list(INTERPRETERS))
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if not INTERPRETERS[request.param]:
        pytest.skip("FOVEA_OPENENV_PYTHON names no interpreter with the package openenv")
    with serving(INTERPRETERS[request.param], SERVER) as address:
        yield address


def corridor(url: str, **settings: Any) -> OpenEnv:
    given = {"url": url, "action_key": "direction", "image_keys": ("nested",), "text_keys": ("text",)}
    return OpenEnv(OpenEnvEnvironment.model_validate(given | settings))


def cell(pictures: list[ImageRef]) -> set[int]:
    """The lit cell in pictures of the corridor."""
    return {int(np.asarray(OPENER(picture))[0, :, 0].argmax()) // 8 for picture in pictures}


def test_every_form_of_a_picture_shows_the_same(url: str) -> None:
    environment = corridor(url, image_keys=("encoded", "listed", "nested", "flat"))
    assert environment.has_sessions
    for row in range(3):
        task = environment.tasks("train")[row]
        at = int(np.random.default_rng(row).integers(0, 3))
        assert len(task.images) == 5
        assert cell(list(task.images)) == {at}
        assert {OPENER(picture).size for picture in task.images} == {(32, 8)}
        assert task.question.splitlines() == [f"cell {at} of 4", "Choose the next action."]


def test_an_episode_is_played_to_its_end(url: str) -> None:
    environment = corridor(url, reset={"length": 5})
    task = environment.tasks("test")[0]
    (at,) = cell(list(task.images))
    steps = 4 - at
    replies, score = played(environment, task, ["<action>right</action>"] * 9)
    assert [cell([part for part in reply.parts if isinstance(part, ImageRef)]) for reply in replies] == [
        {at + 1 + step} for step in range(steps - 1)
    ]
    assert score == Score(reward=1 - 0.25 * (steps - 1), accuracy=1.0, turns=(*[-0.25] * (steps - 1), 1.0))


def test_the_last_turn_counts_and_an_action_may_be_an_object(url: str) -> None:
    environment = corridor(url, reset={"length": 2}, max_turns=1)
    assert played(environment, environment.tasks("train")[0], ["right"])[1].accuracy == 1
    environment, answers = corridor(url, action_key=None), ["right", '<action>{"direction": "left"}</action>']
    replies, score = played(environment, environment.tasks("train")[0], answers)
    assert [reply.failed for reply in replies] == [True, False]
    assert score.turns == (0.0, -0.25)


def test_many_episodes_at_once_each_have_an_environment(url: str) -> None:
    environment = corridor(url, reset={"length": 9}, max_turns=3)
    task = environment.tasks("train")[0]

    async def both() -> list[int]:
        sessions = [await environment.open(task, 0) for _ in range(2)]
        ways = [[Turn(messages=(), text=way)] for way in ("right", "left")]
        replies = [await session.reply(turns) or () for session, turns in zip(sessions, ways, strict=True)]
        for session in sessions:
            await session.close()
        return [int(str(reply[0].parts[-1]).split()[1]) for reply in replies]

    right, left = asyncio.run(both())
    assert right > left


def test_failures_are_named(url: str) -> None:
    environment = corridor(url)
    task = environment.tasks("train")[0]
    with pytest.raises(NoScoreError, match=r"^at http://127.0.0.1:\d+ refuses step: there is no way up$"):
        played(environment, task, ["up"])
    changing = corridor(url, text_keys=("text", "step_id"))
    with pytest.raises(NoScoreError, match=r"seed 0\b"):
        played(changing, changing.tasks("train")[0], ["left"])
    with pytest.raises(ConfigError, match=r"an observation with .*text, .*, without depth; correct its settings"):
        corridor(url, image_keys=("depth",))

    async def too_many() -> None:
        sessions = []
        try:
            for _ in range(9):
                sessions.append(await environment.open(task, 0))
        finally:
            for session in sessions:
                await session.close()

    with pytest.raises(NoScoreError, match=r"(refuses reset: .*capacity|gave no answer to reset)"):
        asyncio.run(too_many())
    with pytest.raises(ConfigError, match=r"^url=http://127.0.0.1:9\b") as caught:
        corridor("http://127.0.0.1:9")
    assert "\n" not in str(caught.value)


def test_a_server_that_never_answers_is_named_and_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(openenv, "RESET_SECONDS", 0.5)
    monkeypatch.setattr(event_loop, "SLOW_SECONDS", 0.1)

    async def never(connection: ServerConnection) -> None:
        await connection.wait_closed()

    async def serve(started: Future[int], end: Future[None]) -> None:
        async with websockets.serve(never, "127.0.0.1", 0) as server:
            started.set_result(next(iter(server.sockets)).getsockname()[1])
            await asyncio.wrap_future(end)

    started, end = Future[int](), Future[None]()
    thread = Thread(target=lambda: asyncio.run(serve(started, end)))
    thread.start()
    try:
        with pytest.raises(ConfigError, match=r"gave no answer to reset within 0.5 seconds; start the server"):
            corridor(f"http://127.0.0.1:{started.result(10)}")
        (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("fovea")]
        assert re.match(r"url=http://127.0.0.1:\d+ has not answered reset for 0.1 seconds; waiting", said)
    finally:
        end.set_result(None)
        thread.join()


@table(
    ("text", "key", "action"),
    [
        ("a <action>x</action> <action> left </action>", "way", {"way": "left"}),
        (" left ", "way", {"way": "left"}),
        ('<action>{"a": [1]}</action>', None, {"a": [1]}),
        ('{"a": 1}', None, {"a": 1}),
        ("[1]", None, None),
        ("left", None, None),
        ("[" * 100_000, None, None),
    ],
)
def test_actions_are_read(text: str, key: str | None, action: dict[str, Any] | None) -> None:
    assert action_in(text, key) == action


@table(
    ("value", "shape"),
    [
        *((value, None) for value in ("not base64!", ["aGk=", "§"], ["aGk="] * 9, [[1, 2], [3]], [1, 2, 3])),
        *((value, None) for value in ([[[0, 0, 300]]], [[[0.5, 0.5, 0.5]]], [], {"a": 1}, 3)),
        ([1, 2, 3], [7, 7]),
    ],
)
def test_what_is_not_a_picture_is_named(value: Any, shape: Any) -> None:
    config = OpenEnvEnvironment(url="http://x", image_keys=("shot",))
    with pytest.raises(NoScoreError, match=r"returned no picture in shot .*give base64, or values from 0 to 255"):
        parts_of({"observation": {"shot": value, "shot_shape": shape}}, config)


def test_a_picture_that_is_null_is_left_out_and_long_texts_are_cut() -> None:
    config = OpenEnvEnvironment(url="http://x", image_keys=("shot",), text_keys=("text", "number", "none"))
    observation = {"shot": None, "text": "x" * 30_000, "number": 3, "none": None}
    assert parts_of({"observation": observation}, config) == ("x" * 20_000, "number: 3")
    encoded = base64.b64encode(b"hello").decode()
    (picture,) = parts_of({"observation": observation | {"shot": encoded, "text": None, "number": None}}, config)
    assert isinstance(picture, ImageRef)
    assert picture.source == b"hello"


NEMO_GYM = Path(__file__).parent / "nemo_gym_server.py"
LOOK = {
    "type": "function",
    "name": "look",
    "description": "Look at a place.",
    "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]},
    "strict": True,
}
PICTURE = f"data:image/png;base64,{base64.b64encode(png('red', 16, 8)).decode()}"
PARTS = [{"type": "input_text", "text": "Which letters are hidden?"}]


def row(content: Any = PARTS, tools: Any = (LOOK,), **more: Any) -> dict[str, Any]:
    messages = [{"role": "developer", "content": "Look first."}, {"role": "user", "content": content}]
    return {"responses_create_params": {"input": messages, "tools": list(tools)}, "secret": "abc", **more}


@pytest.fixture(scope="module")
def nemo_gym() -> Iterator[str]:
    with serving(sys.executable, NEMO_GYM) as address:
        yield address


def environment(nemo_gym: str, folder: Path, *rows: Any) -> NemoGym:
    (folder / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    files = (str(folder / "rows.jsonl"),)
    return NemoGym(NemoGymEnvironment(url=nemo_gym, train_files=files, test_files=files, dev_share=0), RowAccess())


def played_with_tools(made: NemoGym, task: Task, answers: Sequence[str]) -> tuple[list[Message], Score]:
    """An episode with tools, as a run plays it."""
    limits = ResultLimits(open_image=OPENER, image_root=None)
    calls = ToolUse(format=JsonCalls(), frame=THOUSANDTHS, limits=limits, check_picture=id, warn=print)
    return played(WithTools(made, calls), task, answers)


def call(**arguments: int) -> str:
    return f'<tool_call>\n{{"name": "look", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def test_a_row_is_a_prompt_with_tools_and_pictures(nemo_gym: str, tmp_path: Path) -> None:
    made = environment(nemo_gym, tmp_path, row([{"type": "input_image", "image_url": PICTURE}, *PARTS]))
    (task,) = made.tasks("train")
    system, user = made.prompt(task)
    assert (system.role, system.parts) == ("system", ("Look first.",))
    assert isinstance(user.parts[0], ImageRef)
    assert OPENER(user.parts[0]).size == (16, 8)
    assert user.parts[1:] == ("Which letters are hidden?",)
    assert [tool.spec.name for tool in made.tools(task)] == ["look"]


def test_calls_are_made_in_the_session_and_the_server_scores_the_conversation(nemo_gym: str, tmp_path: Path) -> None:
    made = environment(nemo_gym, tmp_path, row(), row(secret="xyz"))
    for task, secret in zip(made.tasks("train"), ("abc", "xyz"), strict=True):
        replies, score = played_with_tools(made, task, [f"First. {call(at=0)}{call(at=1)}", call(at=7), secret])
        failed = """status 422 ('{"detail":"nothing is at 7"}')"""
        seen = [f'{{"seen":"{letter}"}}' for letter in secret[:2]]
        assert [message.parts[0] for message in replies] == [*seen, failed]
        assert score == Score(reward=1.0, accuracy=1.0, parts={"right": 1.0, "calls": 3.0})
    assert played_with_tools(made, made.tasks("train")[0], ["wrong"])[1].reward == 0.0


def test_the_conversation_is_a_response_of_openais_types(
    nemo_gym: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call with wrong arguments never comes to the server, and is left out of what it verifies."""
    sent: dict[str, Any] = {}
    post = JsonServer.post

    async def recorded(server: JsonServer, path: str, body: Any = None) -> Any:
        sent[path] = body
        return await post(server, path, body)

    monkeypatch.setattr(JsonServer, "post", recorded)
    made = environment(nemo_gym, tmp_path, row())
    task = made.tasks("train")[0]
    played_with_tools(made, task, [call(), f"Then. {call(at=2)}", "abc"])
    assert sent["/seed_session"] == row()
    assert {**sent["/verify"], "response": 0} == {**row(), "response": 0}
    response = Response.model_validate(sent["/verify"]["response"], strict=True)
    kinds = ["message", "message", "function_call", "function_call_output", "message"]
    assert [item.type for item in response.output] == kinds
    texts = [item.content[0].text for item in response.output if item.type == "message"]  # type: ignore[union-attr]
    assert texts == ["", "Then.", "abc"]


def test_failures_of_the_server_are_named(nemo_gym: str, tmp_path: Path) -> None:
    made = environment(nemo_gym, tmp_path, row(broken=True), row(reward="high"))
    broken, odd = made.tasks("train")
    with pytest.raises(NoScoreError, match=r"failed in /seed_session \(status 500 .*no such game"):
        played_with_tools(made, broken, ["abc"])
    with pytest.raises(NoScoreError, match="reward 'high'"):
        played_with_tools(made, odd, ["abc"])
    down = environment("http://127.0.0.1:9", tmp_path, row())
    with pytest.raises(NoScoreError, match=r"at http://127.0.0.1:9 failed in /seed_session \(ConnectError"):
        played_with_tools(down, down.tasks("train")[0], ["abc"])


@table(
    ("bad", "message"),
    [
        ({"responses_create_params": "text"}, "is not a request with input and tools"),
        ({"responses_create_params": {"input": []}}, "is not a text or a list of messages"),
        ({"responses_create_params": {"input": [{"role": "assistant", "content": "a"}]}}, "message is assistant"),
        ({"responses_create_params": {"input": [{"type": "function_call", "name": "a"}]}}, "is not a message with"),
        (row([{"type": "input_audio"}]), "is not a text or an image"),
        (row(tools=[{"type": "web_search"}]), "is not a function with a name"),
        (row(tools=[{"type": "function", "name": "../verify"}]), "is not a function with a name"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, bad: Any, message: str) -> None:
    made = environment("http://127.0.0.1:9", tmp_path, bad)
    with pytest.raises(BadRowError, match=f"rows.jsonl line 1.*{message}"):
        made.tasks("train")[0]
    with pytest.raises(DataError, match=r"\bresponses_create_params\b.*\bquestion\b"):
        environment("http://127.0.0.1:9", tmp_path, {"question": "a"}).tasks("train")
