"""The sandbox for programs of the model: each limit is reached by a program that tries to cross it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from fovea_gym.errors import ConfigError
from fovea_gym.tools.base import ToolError
from fovea_gym.tools.loading import load_tools
from fovea_gym.tools.python import PythonTool
from gym_tests.tools.pictures import text_of


@pytest.fixture(scope="module")
def tool() -> Iterator[PythonTool]:
    try:
        yield PythonTool.checked()
    except ConfigError as error:
        pytest.skip(str(error))


def test_a_program_prints_its_result_and_sees_an_empty_folder(tool: PythonTool) -> None:
    code = "import os, math\nprint(math.comb(10, 3), os.listdir('.'), [*os.environ])"
    assert text_of(tool, code=code) == "120 [] []\n"
    assert text_of(tool, code="x = 1") == "(the program printed nothing)"


def test_an_error_is_its_last_line(tool: PythonTool) -> None:
    with pytest.raises(ToolError, match="the program failed: ZeroDivisionError: division by zero"):
        text_of(tool, code="1 / 0")
    with pytest.raises(ToolError, match="the program failed: SyntaxError"):
        text_of(tool, code="def")


def test_no_network_and_not_even_this_machine_is_reached(tool: PythonTool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 1).close()
        with pytest.raises(ToolError, match=r"PermissionError: \[Errno 1\] Operation not permitted"):
            text_of(tool, code=f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")


def test_memory_files_and_output_are_limited(tool: PythonTool) -> None:
    with pytest.raises(ToolError, match="MemoryError"):
        text_of(tool, code="x = bytearray(2**30)")
    with pytest.raises(ToolError, match="the program failed"):
        text_of(tool, code="open('f', 'wb').write(bytes(2**26))")
    text = text_of(tool, code="while True: print('a' * 1000)")
    assert text.endswith("... (the program was ended: it printed more than 20000 bytes)")
    with pytest.raises(ToolError, match="the program has 30000 characters"):
        text_of(tool, code="x" * 30_000)


def test_a_program_that_is_killed_says_so_after_its_output(tool: PythonTool) -> None:
    with pytest.raises(ToolError, match="the program failed: it was killed by signal 11"):
        text_of(tool, code="import ctypes; print('last words', flush=True); ctypes.string_at(0)")


@pytest.mark.slow
def test_time_is_limited_awake_and_asleep(tool: PythonTool) -> None:
    programs = {"import time; time.sleep(60)": "longer than 10 seconds", "while True: pass": "10 seconds|it was killed"}
    for code, says in programs.items():
        began = time.monotonic()
        with pytest.raises(ToolError, match=says):
            text_of(tool, code=code)
        assert time.monotonic() - began < 20


def test_it_is_off_without_consent(tool: PythonTool) -> None:
    with pytest.raises(ConfigError, match="which runs programs that the model writes"):
        load_tools(["python"], allow_python=False)
    (loaded,) = load_tools(["python"], allow_python=True)
    assert loaded.spec == tool.spec
