"""Error handling shared by all commands: one line on stderr and an exit code."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from fovea.errors import FoveaError
from fovea.utils.shown_text import printable, without_secrets


@contextmanager
def one_line_errors(*, debug: bool = False) -> Iterator[None]:
    """Turn Fovea's errors, those of files (exit code 2) and Ctrl-C (130) into one line; `debug` adds the traceback."""
    try:
        yield
    except FoveaError as error:
        if debug:
            traceback.print_exc()
        line = printable(without_secrets(" ".join(str(error).split())))
        typer.echo(f"error: {line}", err=True)
        raise typer.Exit(error.exit_code) from None
    except OSError as error:  # a full disk, a folder without permission
        if debug:
            traceback.print_exc()
        line = printable(without_secrets(f"{error.filename or 'a file'}: {error.strerror or error}"))
        typer.echo(f"error: {line}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        typer.echo("stopped by Ctrl-C; resume=auto continues from the last checkpoint, if there is one", err=True)
        raise typer.Exit(130) from None
