"""Options that several commands have, spelled and explained the same in each."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

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
