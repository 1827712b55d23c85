"""All tests of this folder need Megatron: `make test-megatron` installs it, and there none of them may skip."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
IS_REQUIRED = os.environ.get("FOVEA_TEST_BACKEND") == "megatron"

if find_spec("megatron") is None and not IS_REQUIRED:
    # not even imported: these modules import Megatron
    collect_ignore_glob = ["test_*.py"]
else:
    import torch.distributed as dist

    from tests import warm
    from tests.train.megatron import cpu_shims

    cpu_shims.install()
    from megatron.core import parallel_state

    warm.server_module = "tests.train.megatron.warm_server"

    @pytest.fixture(scope="module", autouse=True)
    def _groups_end_with_their_module() -> Iterator[None]:
        """Every model makes some twenty groups, and the threads of each of them stay awake."""
        yield
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.megatron)
