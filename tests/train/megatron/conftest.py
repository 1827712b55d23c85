"""All tests of this folder need Megatron: `make test-megatron` installs it, and there none of them may skip."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
IS_REQUIRED = os.environ.get("FOVEA_TEST_BACKEND") == "megatron"

if find_spec("megatron") is None and not IS_REQUIRED:
    # not even imported: these modules import Megatron
    collect_ignore_glob = ["test_*.py"]
else:
    from tests import warm
    from tests.train.megatron import cpu_shims

    cpu_shims.install()
    warm.server_module = "tests.train.megatron.warm_server"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.megatron)
