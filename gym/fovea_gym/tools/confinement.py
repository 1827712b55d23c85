"""Ways to confine a program written by the model, and the trial that a way has to pass on this machine before use.

The program is treated as an attacker's: reinforcement learning finds whatever raises the reward, such as the gold
answers of the test file, and the text of a page or a tool may steer the model. The program gets

* one empty folder, the only place where it may write: MAX_FILES files and folders, MAX_FILE_MIB each;
* read access to Python's own installation (standard library, interpreter, shared libraries) and nothing else: no
  packages, no files or environment variables of the user, no /proc;
* one process with one thread, so that its memory limit covers everything it starts, also as root;
* no network, no sockets (including Unix sockets: docker.sock, ssh-agent, Ray's), no signals, nothing that outlives it.

In each way a filter of system calls (seccomp) blocks processes, sockets and signals and limits the number of files. The
ways differ in how they protect files: `bubblewrap` and `namespaces` use a new root with nothing else in it; `user`, for
containers whose root may not create namespaces, uses an unused user and Landlock. There is no protection against bugs
of the kernel, timing side channels and, with `user`, tests of whether a path exists.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import marshal
import os
import pwd
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fovea_gym.errors import ConfigError
from fovea_gym.tools import confined

MAX_SECONDS = 10
MAX_MEMORY_MIB = 512
MAX_FILE_MIB = 1
MAX_FILES = 64
LIMITS = {
    resource.RLIMIT_CPU: MAX_SECONDS,
    resource.RLIMIT_AS: MAX_MEMORY_MIB * 2**20,
    resource.RLIMIT_FSIZE: MAX_FILE_MIB * 2**20,
    resource.RLIMIT_NOFILE: 32,
    resource.RLIMIT_NPROC: 0,
    resource.RLIMIT_CORE: 0,
}
FOLDER = "/program"
"""The program's folder under a new root."""
Way = Literal["bubblewrap", "namespaces", "user", "unconfined"]
WAYS: tuple[Way, ...] = ("bubblewrap", "namespaces", "user")
"""The ways to confine a program, in the order in which they are tried."""

_CREATING = "open 2 - openat 257 56 creat 85 - mkdir 83 - mkdirat 258 34 mknod 133 - mknodat 259 33 symlink 88 - " + (
    "symlinkat 266 36 link 86 - linkat 265 37"
)
"""System calls that create a file, each with its number on x86-64 and on ARM; `-` stands for no number."""
_REFUSED = (
    # processes and threads, other programs, leaving the group that is killed at the end
    "fork 57 - vfork 58 - clone 56 220 execve 59 221 execveat 322 281 setsid 112 157 setpgid 109 154 unshare 272 97 "
    "setns 308 268 "
    # signals to other processes, and access to their memory, priority and descriptors
    "kill 62 129 tkill 200 130 tgkill 234 131 rt_sigqueueinfo 129 138 rt_tgsigqueueinfo 297 240 ptrace 101 117 "
    "pidfd_send_signal 424 424 pidfd_open 434 434 pidfd_getfd 438 438 process_vm_readv 310 270 process_madvise 440 440 "
    "process_vm_writev 311 271 process_mrelease 448 448 kcmp 312 272 migrate_pages 256 238 move_pages 279 239 "
    "perf_event_open 298 241 setpriority 141 140 ioprio_set 251 30 sched_setparam 142 118 sched_setscheduler 144 119 "
    "sched_setattr 314 274 sched_setaffinity 203 122 "
    # sockets; the stream socket pair that asyncio creates is allowed
    "socket 41 198 connect 42 203 bind 49 200 listen 50 201 accept 43 202 accept4 288 242 "
    # other interfaces of the kernel
    "io_uring_setup 425 425 io_uring_enter 426 426 io_uring_register 427 427 bpf 321 280 userfaultfd 323 282 "
    "keyctl 250 219 add_key 248 217 request_key 249 218 seccomp 317 277 memfd_secret 447 447 fanotify_init 300 262 "
    "inotify_init 253 - inotify_init1 294 26 name_to_handle_at 303 264 open_by_handle_at 304 265 personality 135 92 "
    # memory that belongs to no process: it would not be counted, and would outlive the program
    "shmget 29 194 shmat 30 196 msgget 68 186 semget 64 190 mq_open 240 180 "
    # file systems and the machine
    "mount 165 40 umount2 166 39 pivot_root 155 41 chroot 161 51 open_tree 428 428 move_mount 429 429 fsopen 430 430 "
    "fsmount 432 432 fspick 433 433 mount_setattr 442 442 quotactl 179 60 quotactl_fd 443 443 syslog 103 116 "
    # changes of files by path, which Landlock does not check
    "truncate 76 45 setxattr 188 5 lsetxattr 189 6 fsetxattr 190 7 removexattr 197 14 lremovexattr 198 15 "
    # refused only for some arguments, see _filters
    "prlimit64 302 261 socketpair 53 199"
)
_TIMES = " utime 132 - utimes 235 - futimesat 261 - utimensat 280 88"
"""Calls that change the times of files that everybody may write; a new root has no such files."""
_UNKNOWN = "clone3 435 435 openat2 437 437"
"""Calls with flags in memory, where a filter cannot read them; libc falls back to the older calls."""
_NEWEST = 451
"""Highest known number; calls that Linux has added since are refused as unknown."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_ALLOW, _ASK, _FAIL, _KILL = 0x7FFF0000, 0x7FC00000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """An interpreter with the paths that it needs."""

    python: str
    visible: tuple[str, ...]
    """Paths of the interpreter, its standard library and shared libraries."""
    hidden: tuple[str, ...]
    """Folders of installed packages inside the visible paths."""
    confined: bytes
    """Code of the module `confined`, compiled in advance by this interpreter, which takes 10 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """A way of confinement that works on this machine."""

    way: Way
    installation: Installation
    uid: int = 0

    @property
    def needs_folder(self) -> bool:
        """True if the caller has to create and remove the program's folder on disk."""
        return self.way in ("user", "unconfined")

    def launch(self, program: str, folder: str = FOLDER) -> tuple[list[str], bytes]:
        """The command that runs a program in this folder, and the bytes for its stdin."""
        here, uid = self.installation, self.uid
        arguments: dict[str, object] = {"way": self.way, "folder": folder, "limits": LIMITS, "visible": here.visible}
        if self.way != "unconfined":
            arguments |= {"seconds": MAX_SECONDS + 2.0, "most_files": MAX_FILES, **_filters(self.way)}
        if self.way == "namespaces":
            arguments |= {"hidden": here.hidden}
        if self.way == "user":
            whole, listed = _without(here.visible, here.hidden)
            parents = {parent for path in here.visible for parent in Path(path).resolve().parents}
            closed = any(not parent.stat().st_mode & 1 for parent in parents)
            arguments |= {"visible": whole, "listed": listed, "uid": uid, "reads_closed_folders": closed}
        command = [here.python, "-I", "-S", "-c", "import marshal, sys; exec(marshal.load(sys.stdin.buffer))"]
        if self.way == "bubblewrap":
            command = [*self._bubblewrap(folder), *command]
        return command, here.confined + marshal.dumps(arguments) + program.encode("utf-8", "replace")

    def _bubblewrap(self, folder: str) -> list[str]:
        command = shutil.which("bwrap")
        if command is None:
            raise FileNotFoundError("bwrap is not installed")
        here = self.installation
        binds = [word for path in here.visible for word in ("--ro-bind", path, path)]
        covers = [word for path in here.hidden for word in ("--tmpfs", path, "--remount-ro", path)]
        return [
            *(command, "--unshare-user-try", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"),
            *("--unshare-cgroup-try", "--die-with-parent", "--cap-drop", "ALL"),
            *(*binds, *covers, "--tmpfs", folder, "--remount-ro", "/", "--chdir", folder, "--"),
        ]


@functools.cache
def _filters(way: Way) -> dict[str, bytes]:
    """Filters of system calls in the kernel's format; ConfigError for a processor whose calls are not listed here."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise ConfigError(f"the numbers of system calls on {machine} are unknown")
    column, architecture = _ARCHITECTURES[machine]
    number, allow, ask = _do(_LOAD, 0), _do(_RETURN, _ALLOW), _do(_RETURN, _ASK)
    refuse, unknown = (_do(_RETURN, _FAIL | error) for error in (_EPERM, _ENOSYS))
    conditions = {
        # counted if the flags contain O_CREAT or O_TMPFILE
        "open": _argument(1) + _do(_ANY_BIT, 0o20000100, 0, 1),
        "openat": _argument(2) + _do(_ANY_BIT, 0o20000100, 0, 1),
        # refused for another process than itself
        "prlimit64": _argument(0) + _do(_EQUAL, 0, 1),
        # refused unless it is a stream: datagram sockets can send to any path
        "socketpair": _argument(1) + _do(_AND, 0xF) + _do(_EQUAL, socket.SOCK_STREAM, 1),
    }

    def answers(table: str, answer: bytes) -> bytes:
        instructions = b""
        words = iter(table.split())
        for name, *numbers in zip(words, words, words, strict=True):
            if numbers[column] != "-":
                body = conditions[name] + answer + number if name in conditions else answer
                instructions += _do(_EQUAL, int(numbers[column]), 0, len(body) // 8) + body
        return instructions

    ours = _do(_LOAD, 4) + _do(_EQUAL, architecture, 1) + _do(_RETURN, _KILL)
    start = ours + number + _do(_AT_LEAST, _NEWEST + 1, 0, 1) + unknown  # this covers the calls of the x32 ABI, too
    refused = answers(_UNKNOWN, unknown) + answers(_REFUSED + (_TIMES if way == "user" else ""), refuse)
    return {"created": start + answers(_CREATING, ask) + allow, "refused": start + refused + allow}


def _do(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction of a filter, with the numbers of instructions to skip if its condition holds and if not."""
    return struct.pack("=HBBI", code, then, otherwise, value)


def _argument(index: int) -> bytes:
    return _do(_LOAD, 16 + 8 * index)


def _without(paths: Iterable[str], hidden: Sequence[str]) -> tuple[list[str], list[str]]:
    """Paths that together cover the given ones without the hidden ones, and the folders that had to be split."""
    whole, split = list[str](), list[str]()
    waiting = list(dict.fromkeys(os.path.realpath(path) for path in paths))
    while waiting:
        path = waiting.pop()
        if path in hidden:
            continue
        if not any(each.startswith(path + "/") for each in hidden):
            whole.append(path)
            continue
        split.append(path)
        with os.scandir(path) as entries:
            waiting += [entry.path for entry in entries if not entry.is_symlink()]
    return whole, split


_DESCRIBE = """
import json, marshal, os, sys
for folder in sys.path:
    for name in os.listdir(folder) if folder.endswith("lib-dynload") else ():
        try:
            __import__(name.partition(".")[0])
        except Exception:
            pass
with open("/proc/self/maps") as file:
    libraries = {line[line.index("/"):].strip() for line in file if "/" in line and ".so" in line}
code = marshal.dumps(compile(sys.stdin.read(), "confined", "exec")).hex()
print(json.dumps([code, *sys.path, *(os.path.dirname(path) for path in libraries)]))
"""
"""Compiles the code from stdin, and prints it with the paths of the standard library and of the shared libraries."""


@functools.cache
def _installation(python: str) -> Installation:
    command = [python, "-I", "-S", "-c", _DESCRIBE]
    text = inspect.getsource(confined)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, env={}, timeout=60)
    code, *described = json.loads(done.stdout)
    found = [python, "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
    found = [path for path in dict.fromkeys(found + described) if os.path.exists(path)]
    paths = [path for path in found if not any(path.startswith(other + "/") for other in found)]
    names = ("site-packages", "dist-packages", "python*/site-packages", "python*/dist-packages")
    packages = {os.path.realpath(each) for path in found for name in names for each in Path(path).glob(name)}
    return Installation(
        python=python, visible=tuple(paths), hidden=tuple(sorted(packages)), confined=bytes.fromhex(code)
    )


def base_python() -> str:
    """The base interpreter of the virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _unused_uid() -> int:
    """A user id without a name or processes, from systemd's range for dynamic users."""
    running = set[int]()
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            running.add(entry.stat().st_uid)
    named = {user.pw_uid for user in pwd.getpwall()}
    return next(uid for uid in range(65519, 61183, -1) if uid not in running | named)


_TRIAL = """
import json, math, os, select, socket, zlib
def attempt(words, attack):
    try:
        attack()
    except (OSError, RuntimeError, MemoryError):
        return
    print(words)
def fork():
    if os.fork() == 0:
        os._exit(0)
def write(path, text="x"):
    with open(path, "w") as file:
        file.write(text)
write("own")
assert open("own").read() == "x" and os.listdir(".") == ["own"], "an empty folder"
attempt("write files outside its folder", lambda: write({victim!r}))
attempt("read files outside its folder", lambda: open({secret!r}).read())
attempt("read the environment of the trainer", lambda: open("/proc/{trainer}/environ").read(1))
attempt("connect to a socket with a path", lambda: socket.socket(socket.AF_UNIX).connect({path!r}))
attempt("connect to a port", lambda: socket.create_connection(("127.0.0.1", {port}), 1))
attempt("send a signal to the trainer", lambda: os.kill({trainer}, 0))
attempt("start a process", fork)
attempt("take more memory than its limit", lambda: bytearray({memory}))
attempt("write a file longer than its limit", lambda: write("long", "x" * {long}))
attempt("make more files than its limit", lambda: [write(str(number)) for number in range({files})])
print("done")
"""
"""A program that tries attacks and prints those that succeeded."""


def _trial(confinement: Confinement) -> str | None:
    """Why a way does not confine programs on this machine, found by attacks on test files; None if it does."""
    with tempfile.TemporaryDirectory(prefix="fovea-trial-", ignore_cleanup_errors=True) as around:
        os.chmod(around, 0o777)  # open modes, so that only the confinement can protect these files
        victim, secret, path, folder = (f"{around}/{name}" for name in ("victim", "secret", "socket", "folder"))
        for file in (victim, secret):
            Path(file).write_text("secret")
            os.chmod(file, 0o666)
        os.mkdir(folder)
        with socket.socket(socket.AF_UNIX) as server, socket.create_server(("127.0.0.1", 0)) as port:
            server.bind(path)
            os.chmod(path, 0o777)
            server.listen()
            program = _TRIAL.format(
                victim=victim,
                secret=secret,
                trainer=os.getpid(),
                path=path,
                port=port.getsockname()[1],
                memory=2 * MAX_MEMORY_MIB * 2**20,
                long=MAX_FILE_MIB * 2**20 + 1,
                files=MAX_FILES + 1,
            )
            command, stdin = confinement.launch(program, folder if confinement.needs_folder else FOLDER)
            try:
                done = subprocess.run(
                    command,
                    input=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env={},
                    timeout=60,
                    start_new_session=True,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return "its trial took longer than a minute"
        lines = done.stdout.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
        if done.returncode == 0 and lines == ["done"]:
            return None
        if lines[-1] == "done":
            return f"in its trial a program could {', '.join(lines[:-1])}"
        return lines[-1][:200]


@functools.cache
def confinement_here(
    ways: tuple[Way, ...] = WAYS, *, python: str | None = None, allow_unconfined: bool = False, section: str = ""
) -> Confinement:
    """The first of the ways that passes its trial on this machine, cached per process; ConfigError if none does."""
    python = python or base_python()
    reasons = []
    for way in ways if sys.platform == "linux" else ():
        try:
            if way == "user" and os.geteuid() != 0:
                raise PermissionError("only root can become an unused user")
            uid = _unused_uid() if way == "user" else 0
            made = Confinement(way=way, installation=_installation(python), uid=uid)
            reason = _trial(made)
        except (OSError, ConfigError, subprocess.SubprocessError, StopIteration) as error:
            reason = str(error) or type(error).__name__
        if reason is None:
            return made
        reasons.append(f"{way}: {reason}")
    if allow_unconfined:
        return Confinement(way="unconfined", installation=_installation(python))
    raise ConfigError(
        f"{section}tools names python, but nothing on this machine can confine programs of the model "
        f"({'; '.join(reasons) or 'that needs Linux'}); install bubblewrap, allow user namespaces, leave python out, "
        f"or set {section}allow_unconfined_python=true if a program may read, change and delete all that you may"
    )
