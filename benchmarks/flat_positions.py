"""A command of fovea by which engine and trainer alike give image tokens the positions of text, as a control.

    python -m benchmarks.flat_positions "1-D positions" eval runs/boxes
    python -m benchmarks.flat_positions "two of three M-RoPE rows dropped" train boxes

An engine with these positions beside a sound trainer is refused before the first update (`benchmarks.parity_faults`).
With both wrong the run goes on, and shows what rows and columns are worth.
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
    """One of these wrong positions wherever a Qwen-VL model's are computed."""
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
