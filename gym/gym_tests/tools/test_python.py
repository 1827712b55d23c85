"""The sandbox for programs of the model: its limits, and each way of confinement under attacks."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fovea_gym.errors import ConfigError
from fovea_gym.tools.base import ToolError
from fovea_gym.tools.confinement import Way, base_python
from fovea_gym.tools.loading import load_tools
from fovea_gym.tools.python import PythonTool
from gym_tests.tools.attacks import Victim, gaps_during
from gym_tests.tools.pictures import text_of


@pytest.fixture(scope="module")
def sandbox() -> Iterator[PythonTool]:
    try:
        yield PythonTool.checked()
    except ConfigError as error:
        pytest.skip(str(error))


def test_a_program_prints_its_result_and_sees_an_empty_folder(sandbox: PythonTool) -> None:
    code = "import os, math\nprint(math.comb(10, 3), os.listdir('.'), [*os.environ])"
    assert text_of(sandbox, code=code) == "120 [] []\n"
    assert text_of(sandbox, code="x = 1") == "(the program printed nothing)"


def test_an_error_is_its_last_line(sandbox: PythonTool) -> None:
    with pytest.raises(ToolError, match="the program failed: ZeroDivisionError: division by zero"):
        text_of(sandbox, code="1 / 0")
    with pytest.raises(ToolError, match="the program failed: SyntaxError"):
        text_of(sandbox, code="def")


def test_no_network_and_not_even_this_machine_is_reached(sandbox: PythonTool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 1).close()
        with pytest.raises(ToolError, match=r"PermissionError: \[Errno 1\] Operation not permitted"):
            text_of(sandbox, code=f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")


def test_memory_files_and_output_are_limited(sandbox: PythonTool) -> None:
    with pytest.raises(ToolError, match="MemoryError"):
        text_of(sandbox, code="x = bytearray(2**30)")
    with pytest.raises(ToolError, match="the program failed"):
        text_of(sandbox, code="open('f', 'wb').write(bytes(2**26))")
    text = text_of(sandbox, code="while True: print('a' * 1000)")
    assert text.endswith("... (the program was ended: it printed more than 20000 bytes)")
    with pytest.raises(ToolError, match="the program has 30000 characters"):
        text_of(sandbox, code="x" * 30_000)


def test_a_program_that_is_killed_says_so_after_its_output(sandbox: PythonTool) -> None:
    with pytest.raises(ToolError, match="the program failed: it was killed by signal 11"):
        text_of(sandbox, code="import ctypes; print('last words', flush=True); ctypes.string_at(0)")


@pytest.mark.slow
def test_time_is_limited_awake_and_asleep(sandbox: PythonTool) -> None:
    programs = {"import time; time.sleep(60)": "longer than 10 seconds", "while True: pass": "10 seconds|it was killed"}
    for code, says in programs.items():
        began = time.monotonic()
        with pytest.raises(ToolError, match=says):
            text_of(sandbox, code=code)
        assert time.monotonic() - began < 20


def test_it_is_off_without_consent(sandbox: PythonTool) -> None:
    with pytest.raises(ConfigError, match="which runs programs that the model writes"):
        load_tools(["python"], allow_python=False)
    (loaded,) = load_tools(["python"], allow_python=True)
    assert loaded.spec == sandbox.spec


PLAIN_UID = 61_000
HONEST = """
import asyncio, decimal, hashlib, json, os, sqlite3, ssl, tempfile, zoneinfo
async def main():
    await asyncio.sleep(0)
    return "awaited"
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("own")
    file.seek(0)
    own = file.read()
os.makedirs("a/b")
for _ in range(500):
    open("a/b/log", "a").write("line")
print(asyncio.run(main()), own, os.path.getsize("a/b/log"), decimal.Decimal("0.1") * 3, sqlite3.connect(":memory:"))
"""
Run = Callable[[Callable[[PythonTool], object]], object]


def as_plain_user(act: Callable[[], object]) -> object:
    """Result of a function in a child of this process that is not root."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(PLAIN_UID, PLAIN_UID, PLAIN_UID)
            os.setresuid(PLAIN_UID, PLAIN_UID, PLAIN_UID)
            os.chdir("/")
            tempfile.tempdir = None
            try:
                answer = {"result": act()}
            except ConfigError as error:
                answer = {"error": str(error)}
            os.write(writing, json.dumps(answer).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as file:
        answer = json.loads(file.read() or '{"error": "the child failed"}')
    os.waitpid(child, 0)
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["result"]


def plain_python() -> str:
    """An interpreter that every user may read."""
    for python in (base_python(), "/usr/bin/python3", "/usr/local/bin/python3"):
        path = Path(python).resolve()
        if path.exists() and all(parent.stat().st_mode & 1 for parent in path.parents):
            return str(path)
    pytest.skip("no Python here that a plain user may run")


@pytest.fixture(
    params=[
        *(("bubblewrap", "root"), ("namespaces", "root"), ("user", "root")),
        *(("bubblewrap", "plain"), ("namespaces", "plain")),
    ],
    ids="-".join,
)
def run(request: pytest.FixtureRequest) -> Run:
    """Run a function on the tool by one way, as root or not."""
    way, user = request.param

    def run(act: Callable[[PythonTool], object]) -> object:
        python = plain_python() if user == "plain" else None
        if user == "root" or os.geteuid() != 0:
            return act(PythonTool.checked([way], python=python))
        return as_plain_user(lambda: act(PythonTool.checked([way], python=python)))

    if user == "root" and os.geteuid() != 0:
        pytest.skip("needs root")
    try:
        run(lambda _tool: None)
    except ConfigError as error:
        pytest.skip(str(error))
    return run


def test_no_attack_succeeds(run: Run) -> None:
    def attacked(tool: PythonTool) -> list[str]:
        # made by the user of the tool, and not in tmp_path, which root keeps closed to others
        with tempfile.TemporaryDirectory() as folder, closing(Victim(Path(folder))) as victim:
            return victim.attacked(tool)

    assert run(attacked) == []


def test_an_honest_program_has_its_folder_and_the_standard_library(run: Run) -> None:
    text = str(run(lambda tool: text_of(tool, code=HONEST)))
    assert text.startswith("awaited own 2000 0.3 <sqlite3.Connection")


def test_calls_are_apart(run: Run) -> None:
    def calls(tool: PythonTool) -> list[str]:
        return [text_of(tool, code="import os; print(os.listdir()); open('left', 'w').write('x')") for _ in range(2)]

    assert run(calls) == ["[]\n", "[]\n"]


def test_a_way_that_does_not_hold_is_refused_with_what_got_through() -> None:
    with pytest.raises(ConfigError, match=r"\ballow_unconfined_python=true\b") as raised:
        PythonTool.checked(["unconfined"])
    for harm in ("write files outside", "read files outside", "connect to a socket with a path", "send a signal"):
        assert harm in str(raised.value)


def test_a_missing_bubblewrap_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"bubblewrap: bwrap\b"):
        PythonTool.checked(["bubblewrap"], python="/usr/bin/../bin/python3")


@pytest.fixture
def unconfined() -> PythonTool:
    tool = PythonTool.checked([], allow_unconfined=True)
    assert tool.confinement.way == "unconfined"
    return tool


def test_the_setting_accepts_the_risk_only_where_nothing_holds(unconfined: PythonTool) -> None:
    assert "1\n" in text_of(unconfined, code="import os; print(1); open('x', 'w')")
    ways: tuple[Way, ...] = ("bubblewrap", "namespaces", "user")
    try:
        first = PythonTool.checked(ways).confinement.way
    except ConfigError as error:
        pytest.skip(str(error))
    assert PythonTool.checked(ways, allow_unconfined=True).confinement.way == first


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import os\nfor n in range(81_000): os.mknod(str(n))\nprint('made')",
        "import os\nfor _ in range(3_000): os.mkdir('d'); os.chdir('d')\nprint('made')",
        "import os\nos.makedirs('a/b/c'); os.chmod('a/b', 0)\nprint('made')",
    ],
    ids=["81,000 files", "3,000 nested folders", "a closed folder"],
)
def test_the_loop_serves_others_while_a_folder_is_removed(
    unconfined: PythonTool, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # in memory: 81,000 files on a busy disk take longer than a program has
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as around:
        monkeypatch.setattr(tempfile, "tempdir", around)
        text, longest = gaps_during(unconfined, code)
        assert text == "made\n"
        assert longest < 0.5
        assert os.listdir(around) == []


@pytest.mark.slow
def test_a_process_that_an_unconfined_program_leaves_does_not_hold_the_call(unconfined: PythonTool) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may start processes under a limit of none")
    began = time.monotonic()
    with pytest.raises(ToolError, match="longer than 10 seconds"):
        text_of(unconfined, code="import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(40)")
    assert time.monotonic() - began < 30
