"""Episodes with a resources server of NeMo-Gym: rows, tools in their session, the reward, failures."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response

from fovea_gym.adapters.nemo_gym import NemoGym
from fovea_gym.errors import BadRowError, DataError
from fovea_gym.graders.base import NoScoreError
from fovea_gym.rows.access import RowAccess
from fovea_gym.rows.images import ImageOpener
from fovea_gym.settings.environments import NemoGymEnvironment
from fovea_gym.tools.base import THOUSANDTHS
from fovea_gym.tools.calls.json_calls import JsonCalls
from fovea_gym.tools.results import ResultLimits
from fovea_gym.tools.session import ToolUse, WithTools
from fovea_gym.types import ImageRef, Message, Score, Task, Turn
from fovea_gym.utils.http_json import JsonServer
from gym_tests.adapters.servers import serving
from gym_tests.images import png
from gym_tests.tables import table

SERVER = Path(__file__).parent / "nemo_gym_server.py"
OPENER = ImageOpener(max_image_mib=1, max_image_megapixels=1)
LOOK = {
    "type": "function",
    "name": "look",
    "description": "Look at a place.",
    "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]},
    "strict": True,
}
PARTS = [{"type": "input_text", "text": "Which letters are hidden?"}]


def picture() -> str:
    return f"data:image/png;base64,{base64.b64encode(png('red', 16, 8)).decode()}"


def row(content: Any = PARTS, tools: Any = (LOOK,), **more: Any) -> dict[str, Any]:
    messages = [{"role": "developer", "content": "Look first."}, {"role": "user", "content": content}]
    return {"responses_create_params": {"input": messages, "tools": list(tools)}, "secret": "abc", **more}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(sys.executable, SERVER) as address:
        yield address


def environment(url: str, folder: Path, *rows: Any) -> NemoGym:
    (folder / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    files = (str(folder / "rows.jsonl"),)
    return NemoGym(NemoGymEnvironment(url=url, train_files=files, test_files=files, dev_share=0), RowAccess())


def played(made: NemoGym, task: Task, answers: list[str]) -> tuple[list[list[Message]], Score]:
    """The replies and the score of an episode with tools, as a run plays it."""
    use = ToolUse(
        format=JsonCalls(),
        frame=THOUSANDTHS,
        limits=ResultLimits(open_image=OPENER, image_root=None),
        check_picture=lambda _ref: None,
        warn=lambda _line: None,
    )

    async def episode() -> tuple[list[list[Message]], Score]:
        session: Any = await WithTools(made, use).open(task, 0)
        turns, replies = list[Turn](), list[list[Message]]()
        messages: Any = made.prompt(task)
        try:
            for answer in answers:
                turns.append(Turn(messages=tuple(messages), text=answer))
                messages = await session.reply(turns)
                replies.append(list(messages or ()))
            return replies, await session.score(turns)
        finally:
            await session.close()

    return asyncio.run(episode())


def call(at: int) -> str:
    return f'<tool_call>\n{{"name": "look", "arguments": {{"at": {at}}}}}\n</tool_call>'


def test_a_row_is_a_prompt_with_tools_and_pictures(url: str, tmp_path: Path) -> None:
    made = environment(url, tmp_path, row([{"type": "input_image", "image_url": picture()}, *PARTS]))
    (task,) = made.tasks("train")
    system, user = made.prompt(task)
    assert (system.role, system.parts) == ("system", ("Look first.",))
    assert isinstance(user.parts[0], ImageRef)
    assert OPENER(user.parts[0]).size == (16, 8)
    assert user.parts[1:] == ("Which letters are hidden?",)
    assert [tool.spec.name for tool in made.tools(task)] == ["look"]


def test_calls_are_made_in_the_session_and_the_server_scores_the_conversation(url: str, tmp_path: Path) -> None:
    made = environment(url, tmp_path, row(), row(secret="xyz"))
    for task, secret in zip(made.tasks("train"), ("abc", "xyz"), strict=True):
        replies, score = played(made, task, [f"First. {call(0)}{call(1)}", call(7), secret])
        texts = [[message.parts[0] for message in reply] for reply in replies]
        assert texts[0] == [f'{{"seen":"{secret[0]}"}}', f'{{"seen":"{secret[1]}"}}']
        assert texts[1] == ["""status 422 ('{"detail":"nothing is at 7"}')"""]
        assert (texts[2], score.reward, score.accuracy, score.parts) == ([], 1.0, 1.0, {"right": 1.0, "calls": 3.0})
    assert played(made, made.tasks("train")[0], ["wrong"])[1].reward == 0.0


def test_the_conversation_is_a_response_of_openais_types(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call with wrong arguments never comes to the server, and is left out of what it verifies."""
    sent: dict[str, Any] = {}
    post = JsonServer.post

    async def recorded(server: JsonServer, path: str, body: Any = None) -> Any:
        sent[path] = body
        return await post(server, path, body)

    monkeypatch.setattr(JsonServer, "post", recorded)
    made = environment(url, tmp_path, row())
    task = made.tasks("train")[0]
    played(made, task, ['<tool_call>{"name": "look", "arguments": {}}</tool_call>', f"Then. {call(2)}", "abc"])
    assert sent["/seed_session"] == row()
    assert {**sent["/verify"], "response": 0} == {**row(), "response": 0}
    response = Response.model_validate(sent["/verify"]["response"], strict=True)
    kinds = ["message", "message", "function_call", "function_call_output", "message"]
    assert [item.type for item in response.output] == kinds
    texts = [item.content[0].text for item in response.output if item.type == "message"]  # type: ignore[union-attr]
    assert texts == ["", "Then.", "abc"]


def test_failures_of_the_server_are_named(url: str, tmp_path: Path) -> None:
    made = environment(url, tmp_path, row(broken=True), row(reward="high"))
    broken, odd = made.tasks("train")
    with pytest.raises(NoScoreError, match=r"failed in /seed_session \(status 500 .*no such game"):
        played(made, broken, ["abc"])
    with pytest.raises(NoScoreError, match="reward 'high'"):
        played(made, odd, ["abc"])
    down = environment("http://127.0.0.1:9", tmp_path, row())
    with pytest.raises(NoScoreError, match=r"at http://127.0.0.1:9 failed in /seed_session \(ConnectError"):
        played(down, down.tasks("train")[0], ["abc"])


@table(
    ("bad", "message"),
    [
        ({"responses_create_params": "text"}, "is not a request with input and tools"),
        ({"responses_create_params": {"input": []}}, "is not a text or a list of messages"),
        (
            {"responses_create_params": {"input": [{"role": "assistant", "content": "a"}]}},
            "the last message is assistant",
        ),
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


def test_files_without_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\bresponses_create_params\b.*\bquestion\b"):
        environment("http://127.0.0.1:9", tmp_path, {"question": "a"}).tasks("train")
