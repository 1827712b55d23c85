"""The sandbox for programs of the model: its limits, and each way of confinement under attacks."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path

import pydantic
import pytest

from fovea_gym.errors import ConfigError
from fovea_gym.tools.base import ToolError
from fovea_gym.tools.confinement import Way, base_python
from fovea_gym.tools.loading import load_tools
from fovea_gym.tools.python import PythonTool
from gym_tests.tables import table
from gym_tests.tools.pictures import text_of

SECRET = "the key of all keys"
ATTACKS: Mapping[str, str] = {
    # writing
    "write a victim file": "open(victim, 'w').write('x')",
    "append to it": "open(victim, 'a').write('x')",
    "truncate it": "os.truncate(victim, 0)",
    "open it with O_TRUNC only": "os.open(victim, os.O_RDONLY | os.O_TRUNC)",
    "remove it": "os.remove(victim)",
    "rename it": "os.rename(victim, 'mine')",
    "link it": "os.link(victim, 'mine')",
    "change its mode": "os.chmod(victim, 0o777)",
    "change its times": "os.utime(victim, (1, 1)); os.utime(victim)",
    "mark it": "os.setxattr(victim, 'user.mark', b'x')",
    "write it by a link": "os.symlink(victim, 'link'); open('link', 'w').write('x')",
    "remove a tree": "shutil.rmtree(tree)",
    "make a file beside it": "open(tree + '/new', 'w')",
    "write into the library of Python": "open(os.path.dirname(os.__file__) + '/sitecustomize.py', 'w')",
    "leave its root": "[os.chdir('..') for _ in range(50)]; open('tmp/escape', 'w')",
    "use chroot": "os.mkdir('new'); os.chroot('new')",
    "change into namespaces": "assert libc.unshare(0x10000000) == 0, 'refused'",
    "mount": "assert libc.mount(b'tmpfs', b'/', b'tmpfs', 0, None) == 0, 'refused'",
    # reading
    "read a key file": "print(open(key).read())",
    "read gold answers": "print(open(gold).read())",
    "read them by a link": "os.symlink(gold, 'soft'); print(open('soft').read())",
    "read them by a hard link": "os.link(gold, 'hard'); print(open('hard').read())",
    "list the folder of the key": "print(os.listdir(os.path.dirname(key)))",
    "read the users": "print(open('/etc/passwd').read())",
    "read packages": "print(os.listdir(packages)[0]); print(open(packages + '/fovea/__init__.py').read())",
    "read the environment of the trainer": "print(open(f'/proc/{trainer}/environ').read())",
    "read the memory of the trainer": "open(f'/proc/{trainer}/mem', 'rb').read(0)",
    "read its own environment": "print(open('/proc/self/environ').read())",
    "find an environment": "assert os.environ, 'refused'",
    "open a file by its handle": "assert libc.open_by_handle_at(0, bytes(128), 0) >= 0, 'refused'",
    # sockets
    "connect to a socket with a path": "socket.socket(socket.AF_UNIX).connect(door)",
    "connect a pair of datagram sockets": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', door)",
    "send from a pair of streams": "socket.socketpair()[0].connect(door)",
    "connect to a port": "socket.create_connection(('127.0.0.1', port), 1)",
    "listen": "socket.create_server(('127.0.0.1', 0))",
    "make a socket": "socket.socket(socket.AF_UNIX).bind('mine')",
    "set up io_uring": "assert libc.syscall(425, 8, bytes(256)) >= 0, 'refused'",
    # others
    "kill the trainer": "os.kill(trainer, 9)",
    "kill its parent": "os.kill(os.getppid(), 9)",
    "kill everything": "os.kill(-1, 9)",
    "trace its parent": "assert libc.ptrace(16, os.getppid(), 0, 0) == 0, 'refused'",
    "read memory of its parent": "open(f'/proc/{os.getppid()}/mem', 'rb').read(0)",
    "limit its parent": "resource.prlimit(os.getppid() or 1, resource.RLIMIT_CPU, (1, 1))",
    "raise its own limit": "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
    "start threads": "threading.Thread(target=print).start()",
    "leave its group": "os.setsid()",
    "take 1 GiB": "bytearray(2**30)",
    "leave shared memory behind": "assert libc.shmget(0, 2**20, 0o1600) >= 0, 'refused'",
}
"""What a program tries, and how; each is refused by an exception."""
ALONE: Mapping[str, str] = {
    "fork 20 times 150 MiB": "print([os.fork() or time.sleep(len(bytearray(150 * 2**20)) and 1) for _ in range(20)])",
    "start another program": "os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
    "spawn one": "os.posix_spawn(sys.executable, [sys.executable, '-c', 'print(1)'], {})",
    "leave a process behind": "if os.fork() == 0: os.setsid(); time.sleep(20)",
    "write a long file": "open('long', 'wb').write(bytes(2**21))",
    "make a file of holes": "os.truncate(os.open('holes', os.O_CREAT | os.O_RDWR), 2**30)",
    "fill the disk": "[open(f'{n}', 'wb').write(bytes(2**20)) for n in range(100)]",
    "make files without end": "[open(f'{n}', 'w').close() for n in range(100)]",
    "make folders without end": "[(os.mkdir('d'), os.chdir('d')) for n in range(100)]",
    "make files in folders that nobody can list": "for d in range(9):\n    os.mkdir(f'{d}')\n"
    "    for n in range(30): open(f'{d}/{n}', 'w').close()\n    os.chmod(f'{d}', 0)",
    "make files without a name": "[os.open('.', os.O_TMPFILE | os.O_RDWR) for _ in range(100)]",
}
"""Attacks that would not leave the program as it was: each in a separate program."""
_PROGRAM = """
import ctypes, json, os, resource, shutil, socket, sys, threading, time
libc, home, succeeded = ctypes.CDLL(None), os.getcwd(), []
for attack, code in {attacks!r}.items():
    os.chdir(home)
    try:
        exec(code, {{**globals(), **{names!r}}})
    except (OSError, MemoryError, RuntimeError, ValueError, AssertionError):
        continue
    succeeded.append(attack)
print(json.dumps(succeeded))
"""


class Victim:
    """Everything that the attacks are on, open to all users."""

    def __init__(self, folder: Path) -> None:
        self._around = folder / "around"
        self._tree = self._around / "tree"
        (self._tree / "inside").mkdir(parents=True)
        self._files = {name: self._around / name for name in ("victim", "key", "gold")}
        for file in self._files.values():
            file.write_text(SECRET)
            os.utime(file, (1e9, 1e9))
        for path in (folder, self._around, *self._around.rglob("*")):
            path.chmod(0o777)
        self._trainer = subprocess.Popen(["sleep", "300"], env={"KEY": SECRET})
        door = f"{self._around}/door"
        self._servers = (socket.socket(socket.AF_UNIX), socket.create_server(("127.0.0.1", 0)))
        self._servers[0].bind(door)
        os.chmod(door, 0o777)
        self._servers[0].listen()
        for server in self._servers:
            server.setblocking(False)
        self._names: dict[str, object] = {name: str(file) for name, file in self._files.items()}
        self._names |= {"tree": str(self._tree), "packages": str(Path(pydantic.__file__).parents[1])}
        self._names |= {"trainer": self._trainer.pid, "door": door, "port": self._servers[1].getsockname()[1]}

    def attacked(self, tool: PythonTool) -> list[str]:
        """Run all attacks; those that succeeded, in the words of the attacker or by their effects."""
        succeeded = list[str]()
        for attacks in (ATTACKS, *({attack: code} for attack, code in ALONE.items())):
            text = text_of(tool, code=_PROGRAM.format(attacks=dict(attacks), names=self._names))
            succeeded += json.loads(text.splitlines()[-1])
            succeeded += [f"print the secret: {text}"] * (SECRET in text)
        for name, file in self._files.items():
            if file.read_text() != SECRET or file.stat().st_mtime != 1e9 or file.stat().st_mode & 0o777 != 0o777:
                succeeded.append(f"change {name}")
        if [path.name for path in self._tree.rglob("*")] != ["inside"]:
            succeeded.append("change the tree")
        if self._trainer.poll() is not None:
            succeeded.append("end the trainer")
        for server in self._servers:
            with suppress(BlockingIOError):
                server.accept()
                succeeded.append("connect")
        return succeeded + [f"outlive its call: {each}" for each in orphans()]

    def close(self) -> None:
        self._trainer.kill()
        self._trainer.wait()
        for server in self._servers:
            server.close()


def orphans() -> list[str]:
    """Processes of the tool whose parent has ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, status = (entry / "cmdline").read_bytes(), (entry / "status").read_text()
        except OSError:
            continue
        if b"marshal.load(sys.stdin.buffer)" in command and "PPid:\t1\n" in status:
            found.append(entry.name)
    return found


def gaps_during(tool: PythonTool, code: str) -> tuple[str, float]:
    """Output of a program, and the longest time for which the event loop served nobody else."""

    async def run() -> tuple[str, float]:
        loop = asyncio.get_running_loop()
        call = asyncio.create_task(tool.call({"code": code}, ()))
        longest, before = 0.0, loop.time()
        while not call.done():
            await asyncio.sleep(0.01)
            longest, before = max(longest, loop.time() - before), loop.time()
        return str((await call)[0]), longest

    return asyncio.run(run())


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


@table(
    ("code", "says"),
    [
        ("1 / 0", "the program failed: ZeroDivisionError: division by zero"),
        ("def", "the program failed: SyntaxError"),
        ("x = bytearray(2**30)", "MemoryError"),
        ("open('f', 'wb').write(bytes(2**26))", "the program failed"),
        ("x" * 30_000, "the program has 30000 characters"),
        ("import ctypes; print('last words', flush=True); ctypes.string_at(0)", "failed: it was killed by signal 11"),
    ],
)
def test_an_error_is_its_last_line(code: str, says: str, sandbox: PythonTool) -> None:
    with pytest.raises(ToolError, match=says):
        text_of(sandbox, code=code)


def test_no_network_and_not_even_this_machine_is_reached(sandbox: PythonTool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 1).close()
        with pytest.raises(ToolError, match=r"PermissionError: \[Errno 1\] Operation not permitted"):
            text_of(sandbox, code=f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")


def test_output_is_limited(sandbox: PythonTool) -> None:
    text = text_of(sandbox, code="while True: print('a' * 1000)")
    assert text.endswith("... (the program was ended: it printed more than 20000 bytes)")


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
    params=["bubblewrap-root", "namespaces-root", "user-root", "bubblewrap-plain", "namespaces-plain"],
)
def run(request: pytest.FixtureRequest) -> Run:
    """Run a function on the tool by one way, as root or not."""
    way, user = request.param.split("-")

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
