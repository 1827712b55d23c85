"""Tools of MCP servers, against real servers of the package `mcp`, over stdin and stdout and over HTTP."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mcp_types import AudioContent, CallToolResult, EmbeddedResource, ImageContent, TextContent, TextResourceContents
from PIL import Image
from pydantic import ValidationError

from fovea_gym.adapters.mcp import McpConnection, McpTool, parts_of
from fovea_gym.errors import ConfigError
from fovea_gym.settings.mcp import McpServer
from fovea_gym.tools.base import ToolError
from fovea_gym.types import ImageRef
from gym_tests.tables import table

SERVER = Path(__file__).parent / "mcp_server.py"
COMMAND = (sys.executable, str(SERVER))


def call(tools: dict[str, McpTool], tool: str, /, **arguments: object) -> tuple[str | ImageRef, ...]:
    return tuple(asyncio.run(tools[tool].call(arguments, ())))


def opened(connection: McpConnection) -> dict[str, McpTool]:
    return {tool.spec.name: tool for tool in connection.tools()}


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, McpTool]]:
    connection = McpConnection("squares", McpServer(command=COMMAND))
    yield opened(connection)
    connection.close()


def test_tools_are_described_by_their_server(tools: dict[str, McpTool]) -> None:
    spec = tools["square"].spec
    assert (spec.description, spec.parameters["required"]) == ("Draw a square of a colour.", ["colour"])
    properties: Any = spec.parameters["properties"]
    assert properties["side"]["type"] == "integer"


def test_a_result_holds_pictures_and_texts(tools: dict[str, McpTool]) -> None:
    (picture,) = call(tools, "square", colour="red", side=40)
    assert isinstance(picture, ImageRef)
    assert picture.where == "the result of squares.square"
    assert isinstance(picture.source, bytes)
    image = Image.open(io.BytesIO(picture.source))
    assert (image.size, image.getpixel((3, 3))) == ((40, 40), (255, 0, 0))
    assert call(tools, "add", a=2, b=3) == ("5",)


def test_a_long_text_is_cut_and_says_so(tools: dict[str, McpTool]) -> None:
    assert call(tools, "long") == ("x" * 20_000 + " [10000 more characters]",)


@table(
    ("name", "arguments", "message"),
    [
        ("broken", {}, "Error executing tool broken"),
        ("add", {"a": "one", "b": 2}, "valid integer"),
        ("square", {"colour": "no such"}, "Error executing tool square"),
    ],
)
def test_a_failed_call_is_an_error_for_the_model(
    tools: dict[str, McpTool], name: str, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ToolError, match=message):
        call(tools, name, **arguments)


def test_a_server_that_ends_fails_one_call_and_is_started_again(tools: dict[str, McpTool]) -> None:
    (first,) = call(tools, "pid")
    with pytest.raises(ToolError, match="MCP server squares failed: MCPError: Connection closed"):
        call(tools, "end")
    (second,) = call(tools, "pid")
    assert first != second


def test_each_end_of_a_server_makes_one_more_connection(tmp_path: Path) -> None:
    """Two calls side by side find it ended, and it is started once for both; between calls it ends unseen."""
    starts = tmp_path / "starts"
    code = f"open({str(starts)!r}, 'a').write('x'); exec(open({str(SERVER)!r}).read())"
    connection = McpConnection("squares", McpServer(command=(sys.executable, "-c", code)))
    own = opened(connection)

    async def end_beside_a_slow_call() -> Any:
        slow = asyncio.create_task(own["slow"].call({}, ()))
        return await asyncio.gather(slow, own["end"].call({}, ()), return_exceptions=True)

    for num_ended in (1, 2):
        assert {type(error) for error in asyncio.run(end_beside_a_slow_call())} == {ToolError}
        (pid,) = call(own, "pid")
        assert starts.read_text() == "x" * (1 + num_ended)
    os.kill(int(str(pid)), signal.SIGKILL)
    with pytest.raises(ToolError, match="Connection closed"):
        call(own, "add", a=1, b=1)
    assert call(own, "add", a=1, b=1) == ("2",)
    assert starts.read_text() == "x" * 4
    connection.close()


@pytest.mark.slow
def test_calls_run_side_by_side_within_their_time(tools: dict[str, McpTool]) -> None:
    connection = McpConnection("late", McpServer(command=COMMAND, timeout_seconds=8, tools=("slow", "add")))
    own = opened(connection)
    assert set(own) == {"slow", "add"}

    async def both() -> None:
        slow = asyncio.create_task(own["slow"].call({}, ()))
        assert await own["add"].call({"a": 1, "b": 1}, ()) == ("2",)
        assert not slow.done()
        with pytest.raises(ToolError, match=r"^MCP server late is late$"):
            await slow

    asyncio.run(both())
    connection.close()


def test_a_server_that_prints_to_stdout_is_named_once_and_sees_only_named_variables(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SQUARES_KEY", "sesame")
    monkeypatch.setenv("OTHER_KEY", "hidden")
    code = f"print('starting'); print('soon', flush=True); exec(open({str(SERVER)!r}).read())"
    settings = McpServer(command=(sys.executable, "-c", code), pass_env=("SQUARES_KEY",), tools=("variable",))
    connection = McpConnection("squares", settings)
    with caplog.at_level(logging.WARNING):
        own = opened(connection)
        assert call(own, "variable", name="SQUARES_KEY") == ("sesame",)
        assert call(own, "variable", name="OTHER_KEY") == ("none",)
        connection.close()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("fovea")] == [
        "MCP server squares prints to stdout, which carries the protocol; those lines are "
        "skipped; make it print to stderr"
    ]


def test_a_server_over_http() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*COMMAND, "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        connection = McpConnection("squares", McpServer(url=f"http://127.0.0.1:{port}/mcp"))
        for _ in range(100):
            with suppress(ConfigError):
                own = opened(connection)
                break
            time.sleep(0.2)
        assert call(own, "add", a=2, b=3) == ("5",)
        (picture,) = call(own, "square", colour="blue")
        assert isinstance(picture, ImageRef)
        process.kill()
        process.wait()
        with pytest.raises(ToolError, match="MCP server squares failed: "):
            call(own, "add", a=2, b=3)
        connection.close()
    finally:
        process.kill()
        process.wait()


@table(
    ("settings", "message"),
    [
        ({"command": ("no-such-program",)}, "there is no program no-such-program; install it, or give its path"),
        ({"command": (sys.executable, "-c", "print(3)")}, "did not list .*; start it, or correct its command or url"),
        ({"url": "http://127.0.0.1:9/mcp"}, "squares .at http://127.0.0.1:9/mcp. did not list its tools .*; start it"),
        ({"url": "http://10.1.2.3/mcp"}, "10.1.2.3 is at 10.1.2.3, in a private network; set allow_private_addresses"),
        (
            {"command": COMMAND, "tools": ("paint",)},
            "has no tool paint, only square, add, .*; correct its setting `tools`",
        ),
        ({"url": "http://127.0.0.1:9/mcp", "api_key_env": "NO_SUCH_KEY"}, "api_key_env=NO_SUCH_KEY, but"),
    ],
)
def test_a_server_without_tools_is_one_line(settings: dict[str, Any], message: str) -> None:
    connection = McpConnection("squares", McpServer.model_validate({"timeout_seconds": 20, **settings}))
    with pytest.raises(ConfigError, match=message) as caught:
        connection.tools()
    connection.close()
    assert "\n" not in str(caught.value)
    assert "MCP server squares" in str(caught.value)


@table("settings", [{}, {"command": ("x",), "url": "http://127.0.0.1/"}, {"command": ("x",), "api_key_env": "KEY"}])
def test_a_server_has_a_command_or_an_address(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"an MCP server has either|is sent only to a url"):
        McpServer.model_validate(settings)


TEXT = TextContent(text="see")
PICTURE = ImageContent(data="aGVsbG8=", mime_type="image/png")


@table(
    ("content", "is_error", "expected"),
    [
        ([TEXT, PICTURE, TEXT], False, ["see", b"hello", "see"]),
        ([EmbeddedResource(resource=TextResourceContents(uri="a:b", text="inside"))], False, ["inside"]),
        ([AudioContent(data="aGVsbG8=", mime_type="audio/wav")], False, ["[audio: not shown]"]),
        ([], False, []),
        ([ImageContent(data="§", mime_type="image/png")], False, "t returned a picture that is not base64"),
        ([PICTURE] * 9, False, "t returned 9 pictures; at most 8 are shown"),
        ([TEXT] * 65, False, r"t returned 65 texts and pictures; the limit is 64"),
        ([TEXT, PICTURE, TEXT], True, "see see"),
        ([], True, "t failed"),
    ],
)
def test_content_of_every_type_is_read(content: list[Any], is_error: bool, expected: list[str | bytes] | str) -> None:
    result = CallToolResult(content=content, is_error=is_error)
    if isinstance(expected, str):
        with pytest.raises(ToolError) as caught:
            parts_of(result, "t")
        assert str(caught.value) == expected
    else:
        assert [part.source if isinstance(part, ImageRef) else part for part in parts_of(result, "t")] == expected


KILLED = """
import asyncio, sys
from fovea_gym.settings.mcp import McpServer
from fovea_gym.adapters.mcp import McpConnection

connection = McpConnection("s", McpServer(command=(sys.executable, *sys.argv[1:])))
tools = {tool.spec.name: tool for tool in connection.tools()}
print(*asyncio.run(tools["pid"].call({}, ())), flush=True)
sys.stdin.read()
"""


@pytest.mark.kill
def test_a_server_ends_with_a_run_that_is_killed() -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    server = int(run.stdout.readline())
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    end = time.monotonic() + 20
    with suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.kill(server, 0)
            time.sleep(0.05)
        os.kill(server, signal.SIGKILL)
        raise AssertionError("the server still runs")
