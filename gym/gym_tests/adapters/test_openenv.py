"""OpenEnv servers: pictures in every form, actions, rewards and failures.

The server is a stand-in by the published protocol, and the real one where FOVEA_OPENENV_PYTHON names an interpreter
that has the package `openenv` (0.10.0 passes), whose pins do not go with Fovea's.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import websockets.asyncio.server as websockets
from websockets.asyncio.server import ServerConnection

from fovea_gym.adapters import openenv
from fovea_gym.adapters.openenv import OpenEnv, action_in, parts_of
from fovea_gym.errors import ConfigError
from fovea_gym.graders.base import NoScoreError
from fovea_gym.rows.images import ImageOpener
from fovea_gym.settings.environments import OpenEnvEnvironment
from fovea_gym.types import ImageRef, Score, Turn
from fovea_gym.utils import event_loop
from gym_tests.adapters.servers import serving
from gym_tests.grading import played
from gym_tests.tables import table

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


def test_the_last_turn_counts(url: str) -> None:
    environment = corridor(url, reset={"length": 2}, max_turns=1)
    assert played(environment, environment.tasks("train")[0], ["right"])[1].accuracy == 1


def test_an_action_may_be_an_object(url: str) -> None:
    environment = corridor(url, action_key=None)
    replies, score = played(
        environment, environment.tasks("train")[0], ["right", '<action>{"direction": "left"}</action>']
    )
    assert [reply.failed for reply in replies] == [True, False]
    assert score.turns == (0.0, -0.25)


def test_many_episodes_at_once_each_have_an_environment(url: str) -> None:
    environment = corridor(url, reset={"length": 9}, max_turns=3)
    task = environment.tasks("train")[0]

    async def both() -> list[int]:
        sessions = [await environment.open(task, 0) for _ in range(2)]
        texts = []
        for session, ways in zip(sessions, ("right", "left"), strict=True):
            reply = await session.reply([Turn(messages=(), text=ways)])
            assert reply is not None
            texts.append(str(reply[0].parts[-1]))
        for session in sessions:
            await session.close()
        return [int(text.split()[1]) for text in texts]

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
    with pytest.raises(
        ConfigError, match=r"returned an observation with .*text, .*, without depth; correct its settings"
    ):
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


def test_a_server_that_is_down_is_one_line() -> None:
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
        ("not base64!", None),
        (["aGk=", "§"], None),
        (["aGk="] * 9, None),
        ([[1, 2], [3]], None),
        ([1, 2, 3], None),
        ([1, 2, 3], [7, 7]),
        ([[[0, 0, 300]]], None),
        ([[[0.5, 0.5, 0.5]]], None),
        ([], None),
        ({"a": 1}, None),
        (3, None),
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
