"""The command `fovea` on a CPU, where a model that any process but the first reads is an error."""

from __future__ import annotations

import os

from fovea.cli.main import main
from fovea.wiring import model
from tests.train.megatron import cpu_shims


def refuse(*_: object) -> None:
    raise AssertionError(f"rank {os.environ['RANK']} reads the model")


if __name__ == "__main__":
    cpu_shims.install()
    if os.environ["RANK"] != "0":
        model.load_network = refuse  # type: ignore[assignment]
    main()
