"""Error handling shared by all commands: one line on stderr and an exit code."""

from __future__ import annotations

import re
import select
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from fovea.errors import FoveaError, SeveralErrors
from fovea.utils.shown_text import printable, without_secrets

_ARGUMENT = re.compile(r"(?<![\w.])(?:(trust)=True|(recipe|api_key_env)=([\w./-]+))")
"""An argument of a Python function, as errors name it that both the functions and the commands have."""


def with_options(text: str) -> str:
    """The text with options of the command line, as `--recipe FILE`, in place of arguments of Python functions."""
    return _ARGUMENT.sub(_option, text)


def _option(argument: re.Match[str]) -> str:
    flag, name, value = argument.groups()
    return f"--{flag}" if flag else f"--{name.replace('_', '-')} {value}"


def _reader_has_gone() -> bool:
    """Whether nobody reads stdout any more."""
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
        told = f"; {stop}" if str(stop) else ""
        typer.echo(f"stopped by Ctrl-C{told}", err=True)
        raise typer.Exit(130) from None
