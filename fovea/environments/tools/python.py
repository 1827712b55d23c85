"""Programs that the model writes, each in a separate process: with limits of time and memory, without network.

It has an empty environment and folder, and starts no other process. It reads whatever files the user may read: run
untrusted models in a container.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from fovea.environments.tools.base import Picture, ToolError, object_schema
from fovea.errors import ConfigError
from fovea.types import ImageRef, ToolSpec

MAX_SECONDS = 10
MAX_MEMORY_MIB = 512
MAX_OUTPUT_BYTES = 20_000
MAX_CODE_CHARACTERS = 20_000
MAX_FILE_MIB = 16
# the limits are set by the child itself, before it runs the program: a function between fork and exec may hang in a
# process with threads
_CHILD = f"""
import resource, sys
mib = 2**20
limits = {{
    resource.RLIMIT_CPU: {MAX_SECONDS},
    resource.RLIMIT_AS: {MAX_MEMORY_MIB} * mib,
    resource.RLIMIT_FSIZE: {MAX_FILE_MIB} * mib,
    resource.RLIMIT_NOFILE: 32,
    resource.RLIMIT_NPROC: 0,
    resource.RLIMIT_CORE: 0,
}}
for kind, limit in limits.items():
    resource.setrlimit(kind, (limit, limit))
code = sys.stdin.read()
sys.stdin.close()
exec(compile(code, "program", "exec"), {{"__name__": "__main__"}})
"""


class PythonTool:
    """Tool that runs a program and returns the text that it prints."""

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

    def __init__(self, prefix: Sequence[str]) -> None:
        """`prefix` is a command that runs another one without network."""
        self._prefix = tuple(prefix)

    @staticmethod
    def checked() -> PythonTool:
        """The tool; ConfigError where this machine cannot take the network from a process."""
        unshare = shutil.which("unshare")
        if unshare is None or sys.platform != "linux":
            raise ConfigError("environment.tools names python, which needs Linux and the command unshare; leave it out")
        prefix = (unshare, "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
        done = subprocess.run([*prefix, sys.executable, "-c", ""], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(
                "environment.tools names python, but this machine does not let a process give up the network "
                f"({done.stderr.strip()[:200]}); allow user namespaces, or leave it out"
            )
        return PythonTool(prefix)

    async def call(self, arguments: Mapping[str, object], _pictures: Sequence[Picture]) -> Sequence[str | ImageRef]:
        code = str(arguments["code"])
        if len(code) > MAX_CODE_CHARACTERS:
            raise ToolError(f"the program has {len(code)} characters; the limit is {MAX_CODE_CHARACTERS}")
        with tempfile.TemporaryDirectory(prefix="fovea-python-", ignore_cleanup_errors=True) as folder:
            return (await self._run(code, folder),)

    async def _run(self, code: str, folder: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *self._prefix,
            *(sys.executable, "-I", "-S", "-c", _CHILD),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(MAX_SECONDS + 1):
                output, is_whole = await _exchanged(process, code)
                if is_whole:
                    await process.wait()
        except TimeoutError:
            raise ToolError(f"the program ran longer than {MAX_SECONDS} seconds; make it shorter") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # asyncio sees the end of a process only where its pipe has been read to the end
            await process.communicate()
        if not is_whole:
            return f"{output}... (the program was ended: it printed more than {MAX_OUTPUT_BYTES} bytes)"
        if process.returncode:
            raise ToolError(f"the program failed: {reason(output)}")
        return output or "(the program printed nothing)"


def reason(output: str) -> str:
    """Last line that a program printed before it failed; that of a killed one may be unshare's remark about its end."""
    lines = [line for line in output.strip().splitlines() if not line.startswith("unshare: ")]
    return lines[-1] if lines else "it was killed"


async def _exchanged(process: asyncio.subprocess.Process, code: str) -> tuple[str, bool]:
    """Send the program, and read its output; False where that is longer than the limit."""
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    process.stdin.write(code.encode("utf-8", "replace"))
    process.stdin.close()
    output = b""
    while len(output) <= MAX_OUTPUT_BYTES and (piece := await process.stdout.read(4096)):
        output += piece
    return output[:MAX_OUTPUT_BYTES].decode("utf-8", "replace"), len(output) <= MAX_OUTPUT_BYTES
