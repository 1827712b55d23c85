"""The commands that one may want next, as they can be pasted into the shell that the running one was typed in."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def after_training(run: Path, *, trust: bool) -> str:
    """Commands for a finished run, a line each; with `trust`, those that open its model name that option."""
    fovea, folder = typed_command(), shlex.quote(str(run))
    option = " --trust" if trust else ""
    exported = shlex.quote(str(Path("exported", run.name)))
    return "\n".join(
        (
            "next:",
            f"  {fovea} view {folder}",
            f"  {fovea} eval {folder} majority --html eval.html{option}",
            f"  {fovea} export {folder} --out {exported}{option}",
        )
    )


def typed_command() -> str:
    """The command of this process without its arguments: `fovea`, `.venv/bin/fovea` or `python -m fovea`."""
    program = sys.argv[0]
    if Path(program).suffix == ".py":
        return f"{shlex.quote(sys.executable)} -m fovea"
    return "fovea" if program == shutil.which("fovea") else shlex.quote(program)
