"""The way out of every command: a `FoveaError` ends in one line and exit code 2, Ctrl-C in one line and 130."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from fovea.errors import FoveaError


@contextmanager
def one_line_errors(*, debug: bool = False) -> Iterator[None]:
    """The way out of every command."""
    try:
        yield
    except FoveaError as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:  # a full disk, a folder without permission
        if debug:
            traceback.print_exc()
        typer.echo(f"error: {error.filename or 'a file'}: {error.strerror or error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        typer.echo("stopped by Ctrl-C; resume=auto goes on from the last checkpoint, if there is one", err=True)
        raise typer.Exit(130) from None
