"""Settings of every test process of the gym's suite."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run at once

import pytest

# so that the assertions of helpers explain their failures as those of tests do
HELPERS = {f"gym_tests.{each.stem}" for each in Path(__file__).parent.iterdir()}
pytest.register_assert_rewrite(*HELPERS - sys.modules.keys())
