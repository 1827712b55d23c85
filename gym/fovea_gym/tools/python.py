"""Tool that runs programs written by the model, each confined to an empty folder as `confinement` describes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
import tempfile
from collections.abc import Mapping, Sequence

from fovea_gym.tools.base import Picture, ToolError, object_schema
from fovea_gym.tools.confinement import MAX_MEMORY_MIB, MAX_SECONDS, WAYS, Confinement, Way, confinement_here
from fovea_gym.types import ImageRef, ToolSpec

MAX_OUTPUT_BYTES = 20_000
MAX_CODE_CHARACTERS = 20_000


class PythonTool:
    """Tool that runs a program and returns its output."""

    spec = ToolSpec(
        name="python",
        description=(
            f"Run a Python program and return what it prints. It has {MAX_SECONDS} seconds, {MAX_MEMORY_MIB} MiB, the "
            "standard library only, no network, and no files of earlier programs."
        ),
        parameters=object_schema(
            {"code": {"type": "string", "description": "The program; print its results."}}, ["code"]
        ),
    )

    def __init__(self, confinement: Confinement) -> None:
        self.confinement = confinement

    @staticmethod
    def checked(
        ways: Sequence[Way] = WAYS, *, python: str | None = None, allow_unconfined: bool = False, section: str = ""
    ) -> PythonTool:
        """Make the tool with the first of these ways that works on this machine; ConfigError if none does."""
        return PythonTool(
            confinement_here(tuple(ways), python=python, allow_unconfined=allow_unconfined, section=section)
        )

    async def call(self, arguments: Mapping[str, object], _pictures: Sequence[Picture]) -> Sequence[str | ImageRef]:
        code = str(arguments["code"])
        if len(code) > MAX_CODE_CHARACTERS:
            raise ToolError(f"the program has {len(code)} characters; the limit is {MAX_CODE_CHARACTERS}")
        if not self.confinement.needs_folder:
            return (await _run(*self.confinement.launch(code)),)
        folder = tempfile.mkdtemp(prefix="fovea-python-")
        try:
            return (await _run(*self.confinement.launch(code, folder)),)
        finally:
            await asyncio.to_thread(remove, folder)


async def _run(command: Sequence[str], stdin: bytes) -> str:
    # like asyncio.create_subprocess_exec, which does not expose its transport
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.subprocess_exec(
        lambda: asyncio.subprocess.SubprocessStreamProtocol(limit=2**16, loop=loop),
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={},
        start_new_session=True,
    )
    process = asyncio.subprocess.Process(transport, protocol, loop)
    try:
        async with asyncio.timeout(MAX_SECONDS + 1):
            output, is_whole = await _exchanged(process, stdin)
            if is_whole:
                await process.wait()
    except TimeoutError:
        raise ToolError(f"the program ran longer than {MAX_SECONDS} seconds; make it shorter") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        transport.close()  # and its pipes, which an unconfined program can leave open in another process
        await process.wait()
    if not is_whole:
        return f"{output}... (the program was ended: it printed more than {MAX_OUTPUT_BYTES} bytes)"
    if process.returncode:
        raise ToolError(f"the program failed: {(output.strip().splitlines() or ['it was killed'])[-1]}")
    return output or "(the program printed nothing)"


def remove(folder: str) -> None:
    """Remove a folder of any depth, as far as possible; moves nested folders to its top, so that paths stay short."""
    waiting = [folder]
    names = (f"{folder}/{secrets.token_hex(8)}-{number}" for number in itertools.count())
    while waiting:
        here = waiting.pop()
        with contextlib.suppress(OSError), os.scandir(here) as entries:
            for entry in list(entries):
                with contextlib.suppress(OSError):
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)
                        continue
                    os.chmod(entry.path, 0o700)
                    os.rename(entry.path, moved := next(names))
                    waiting.append(moved)
        with contextlib.suppress(OSError):
            os.rmdir(here)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


async def _exchanged(process: asyncio.subprocess.Process, stdin: bytes) -> tuple[str, bool]:
    """Send the program and read its output; returns False if the output exceeds the limit."""
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    process.stdin.write(stdin)
    process.stdin.close()
    output = b""
    while len(output) <= MAX_OUTPUT_BYTES and (piece := await process.stdout.read(4096)):
        output += piece
    return output[:MAX_OUTPUT_BYTES].decode("utf-8", "replace"), len(output) <= MAX_OUTPUT_BYTES
