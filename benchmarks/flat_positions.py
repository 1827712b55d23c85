"""Runs a fovea command in which engine and trainer give image tokens wrong positions, as a control.

    python -m benchmarks.flat_positions "1-D positions" eval runs/boxes
    python -m benchmarks.flat_positions "two of three M-RoPE rows dropped" train boxes

If only the engine had these positions, the parity gate would stop the run (`benchmarks.parity_faults`). With both
wrong, the run continues and shows how much the positions of rows and columns contribute.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from benchmarks.parity_faults import POSITIONS, Positions
from fovea.cli.main import main as fovea
from fovea.models.families.qwen_vl import QwenVL


@contextmanager
def flat_positions(name: str) -> Iterator[None]:
    """Let Qwen-VL models compute the wrong positions of this name in the context."""
    wrong, own = POSITIONS[name], QwenVL.positions

    def positions(*call: Any) -> Positions:
        return wrong(own, *call)

    with patch.object(QwenVL, "positions", positions):
        yield


def main() -> None:
    name, *arguments = sys.argv[1:]
    with flat_positions(name), patch.object(sys, "argv", ["fovea", *arguments]):
        fovea()


if __name__ == "__main__":
    main()
