"""Attacks of a program of the model, and their victim."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pydantic

from fovea_gym.tools.python import PythonTool
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
