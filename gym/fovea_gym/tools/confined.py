"""Program that drops its own rights and then runs a program written by the model.

A bare interpreter (`python -I -S`) reads the compiled code of this module, its arguments and the model's program from
stdin. It imports only a small part of the standard library, since each tool call waits for the imports. The first
process watches; its child runs the model's program.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import marshal
import os
import resource
import select
import struct
import sys
import time

TYPE_CHECKING = False  # importing the module typing takes as long as all other imports together
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_SYS_SECCOMP, _SYS_PIVOT_ROOT = {"x86_64": (317, 155), "aarch64": (277, 41)}.get(os.uname().machine, (-1, -1))
_SYS_MOUNT_SETATTR, _SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 442, 444, 445, 446
_SIGKILL = 9  # importing the module signal takes as long as starting the interpreter
_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 1, 8, 38
_CAP_DAC_READ_SEARCH = 1 << 2
_NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Flags of unshare for new namespaces of mounts, host name, IPC, users, processes and network."""
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE, _DETACH = 2, 4, 4096, 16384, 1 << 18, 2
_NOTIF_RECV, _NOTIF_SEND, _NOTIF_BYTES = 0xC0502100, 0xC0182101, 80
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_MAKE_DEVICES_AND_SOCKETS = 1 << 6 | 1 << 9 | 1 << 11


def _call(name: str, *arguments: object) -> int:
    """Call a function of libc; OSError if it fails."""
    numbers = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result: int = getattr(_LIBC, name)(*numbers)
    if result < 0:
        code = ctypes.get_errno()
        of = f"{name} {arguments[0]!r}" if name == "syscall" else name
        raise OSError(code, f"{of}: {os.strerror(code)}")
    return result


def enter_namespaces(visible: Sequence[str], hidden: Sequence[str], folder: str) -> None:
    """Move to new namespaces, whose root holds only the `visible` paths, read-only, and the empty folder."""
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", _NEW_NAMESPACES)
    for name, text in {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _call("mount", b"none", b"/", None, _REC | _PRIVATE, None)
    _mount_empty("/tmp")
    os.mkdir("/tmp/old")
    _call("syscall", _SYS_PIVOT_ROOT, b"/tmp", b"/tmp/old")
    os.chdir("/")
    for path in visible:
        if os.path.isdir(f"/old{path}"):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT))
        _call("mount", f"/old{path}".encode(), path.encode(), None, _BIND | _REC, None)
    for path in hidden:
        _mount_empty(path)
    _call("umount2", b"/old", _DETACH)
    os.rmdir("/old")
    os.mkdir(folder)
    read_only = struct.pack("=QQQQ", 1 | _NOSUID | _NODEV, 0, 0, 0)
    _call("syscall", _SYS_MOUNT_SETATTR, -1, b"/", 0x8000, read_only, len(read_only))  # 0x8000: all mounts below, too
    _mount_empty(folder)


def _mount_empty(path: str) -> None:
    _call("mount", b"tmpfs", path.encode(), b"tmpfs", _NOSUID | _NODEV, b"mode=700")


def restrict_files(readable: Sequence[str], listed: Sequence[str], folder: str) -> None:
    """Restrict this process with Landlock: it may read `readable` paths, list `listed` folders, and use the folder."""
    version = _call("syscall", _SYS_CREATE_RULESET, None, 0, 1)
    handled = (1 << 13) - 1
    for right, since in {13: 2, 14: 3, 15: 5}.items():  # rights to move between folders, truncate, control devices
        handled |= (version >= since) << right
    rules = _call("syscall", _SYS_CREATE_RULESET, struct.pack("=Q", handled), 8, 0)

    def allow(paths: Iterable[str], rights: int) -> None:
        for path in paths:
            opened = os.open(path, os.O_PATH)
            ours = rights if os.path.isdir(path) else rights & ~_READ_DIR
            _call("syscall", _SYS_ADD_RULE, rules, 1, struct.pack("=Qi", ours, opened), 0)
            os.close(opened)

    allow(readable, _READ_FILE | _READ_DIR)
    allow(listed, _READ_DIR)
    allow([folder], handled & ~_MAKE_DEVICES_AND_SOCKETS)
    _call("syscall", _SYS_RESTRICT_SELF, rules, 0)
    os.close(rules)


def _become(uid: int, *, reads_closed_folders: bool) -> None:
    """Become an unused user, who may still enter closed folders if Python's installation is in one."""
    _call("prctl", _PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _keep_capabilities(_CAP_DAC_READ_SEARCH if reads_closed_folders else 0)


def _keep_capabilities(kept: int) -> None:
    header = struct.pack("=Ii", 0x20080522, 0)
    _call("capset", header, struct.pack("=6I", kept, kept, 0, 0, 0, 0))


def _filter_calls(program: bytes, flags: int = 0) -> int:
    """Install a seccomp filter for this process and its children; with flag 8, return its notification descriptor."""
    instructions = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    return _call("syscall", _SYS_SECCOMP, 1, flags, head)


def watch(child: int, listener: int, folder: str, most_files: int, seconds: float) -> int:
    """Let the child create up to `most_files` files, kill it after `seconds`, and return its exit code.

    The child has one thread and waits in its system call during the count, so the count cannot change.
    """
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(listener, select.POLLIN)
    deadline, files = time.monotonic() + seconds, 0
    while True:
        ready = [descriptor for descriptor, _ in poll.poll(max(deadline - time.monotonic(), 0) * 1000)]
        if not ready:  # the tool kills the child earlier, unless the trainer has died
            os.kill(child, _SIGKILL)
            deadline += 1
        if ended in ready:
            break
        if listener in ready:
            request = bytearray(_NOTIF_BYTES)
            try:
                fcntl.ioctl(listener, _NOTIF_RECV, request)
                files = files if files < most_files else _count_files(folder, most_files)
                error = -errno.EDQUOT if files >= most_files else 0
                fcntl.ioctl(listener, _NOTIF_SEND, struct.pack("=8sqiI", request[:8], 0, error, error == 0))
            except OSError:  # the child was killed while it waited
                continue
            files += 1
    return exit_code(os.waitpid(child, 0)[1])


def exit_code(status: int) -> int:
    """The exit code of a child; if a signal killed it, a line after its output says so."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        print(f"\nit was killed by signal {-code}", flush=True)
    return abs(code)


def _count_files(folder: str, most_files: int) -> int:
    """Number of files and folders in a folder; one that cannot be read counts as full."""

    def refuse(error: OSError) -> None:
        raise error

    try:
        return sum(len(folders) + len(files) for _, folders, files in os.walk(folder, onerror=refuse))
    except OSError:
        return most_files


def main() -> None:
    """Confine and run the program from stdin; exit with its exit code."""
    given: Mapping[str, Any] = marshal.load(sys.stdin.buffer)
    way, folder, visible = given["way"], given["folder"], given["visible"]
    _call("prctl", _PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if way == "namespaces":
        enter_namespaces(visible, given["hidden"], folder)
    if way == "user":
        os.chown(folder, given["uid"], given["uid"])
    os.chdir(folder)
    os.environ.clear()  # bubblewrap sets variables
    if way == "unconfined":
        if child := os.fork():
            os._exit(exit_code(os.waitpid(child, 0)[1]))
    else:
        _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        listener = _filter_calls(given["created"], flags=8)
        if child := os.fork():
            os._exit(watch(child, listener, folder, given["most_files"], given["seconds"]))
        os.close(listener)
    if way == "user":
        restrict_files(visible, given["listed"], folder)
        _become(given["uid"], reads_closed_folders=given["reads_closed_folders"])
    elif way != "unconfined":
        _keep_capabilities(0)
    _call("prctl", _PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)  # again: it is not inherited, and changing the user clears it
    for kind, limit in given["limits"].items():
        resource.setrlimit(kind, (limit, limit))
    if way != "unconfined":
        _filter_calls(given["refused"])
    code = sys.stdin.read()
    sys.stdin.close()
    exec(compile(code, "program", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
