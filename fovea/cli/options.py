"""Options that several commands have, spelled and explained the same in each."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

Debug: TypeAlias = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only.")]
