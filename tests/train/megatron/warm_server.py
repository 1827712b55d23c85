"""The process that the tests of Megatron fork: tests/warm_server.py with Megatron and its stand-ins imported."""

from __future__ import annotations

from tests.train.megatron import cpu_shims
from tests.warm_server import serve_and_run

if __name__ == "__main__":
    cpu_shims.install()
    import fovea.train.megatron.policy  # noqa: F401  # after the stand-ins

    serve_and_run()
