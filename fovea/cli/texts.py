"""Options that several commands have, spelled and explained the same in each."""

from __future__ import annotations

import re
import select
import shlex
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from fovea.errors import FoveaError, SeveralErrors
from fovea.utils.shown_text import printable, without_secrets

Debug: TypeAlias = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Trust: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Run the reward function or environment that a folder's own settings name, ask their judge, and read "
        "Megatron's checkpoints (a run of yours).",
    ),
]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only.")]
_ARGUMENT = re.compile(r"(?<![\w.])(?:(trust)=True|(recipe|api_key_env)=([\w./-]+))")
"""An argument of a Python function, as errors name it that both the functions and the commands have."""


def with_options(text: str) -> str:
    """The text with options of the command line, as `--recipe FILE`, in place of arguments of Python functions."""
    return _ARGUMENT.sub(lambda at: f"--{at[1]}" if at[1] else f"--{at[2].replace('_', '-')} {at[3]}", text)


def _reader_has_gone() -> bool:
    watched = select.poll()
    watched.register(sys.stdout, select.POLLOUT)
    return any(events & select.POLLERR for _, events in watched.poll(0))


@contextmanager
def one_line_errors(*, debug: bool = False) -> Iterator[None]:
    """Turn Fovea's errors, those of files (exit code 2) and Ctrl-C (130) into one line; `debug` adds the traceback.

    A reader of stdout that has gone, such as `head`, ends the command without a message.
    """
    try:
        yield
    except FoveaError as error:
        if debug:
            traceback.print_exc()
        for each in error.errors if isinstance(error, SeveralErrors) else [error]:
            line = printable(without_secrets(with_options(" ".join(str(each).split()))))
            typer.echo(f"error: {line}", err=True)
        raise typer.Exit(error.exit_code) from None
    except OSError as error:  # a full disk, a folder without permission
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            raise  # typer ends the command
        if debug:
            traceback.print_exc()
        line = printable(without_secrets(f"{error.filename or 'a file'}: {error.strerror or error}"))
        typer.echo(f"error: {line}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt as stop:
        if debug:
            traceback.print_exc()
        reason = f"; {stop}" if str(stop) else ""
        typer.echo(f"stopped by Ctrl-C{reason}", err=True)
        raise typer.Exit(130) from None


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
