"""The command `fovea`, with the stand-ins (`cpu_shims`) that Megatron needs on a CPU."""

from __future__ import annotations

from fovea.cli.main import main
from tests.train.megatron import cpu_shims

if __name__ == "__main__":
    cpu_shims.install()
    main()
