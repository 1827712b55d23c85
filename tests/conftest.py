"""Settings of every test process, and models of all Qwen-VL families as fixtures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run at once, and their programs wait actively for threads
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch

from fovea.models.tiny import TinyParts
from fovea.models.vlm import VLM
from fovea.utils import malloc
from tests.tiny_models import FAMILIES, tiny

torch.set_num_threads(1)
# so that the assertions of helpers explain their failures as those of tests do
pytest.register_assert_rewrite(*{f"tests.{each.stem}" for each in Path(__file__).parent.iterdir()} - sys.modules.keys())


@pytest.fixture(autouse=True)
def _malloc_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in this process, whose other tests measure memory."""
    monkeypatch.setattr(malloc, "keep_freed_memory", lambda: True)
    monkeypatch.setattr(malloc, "use_expandable_segments", lambda: None)


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=FAMILIES)
def parts(request: pytest.FixtureRequest) -> TinyParts:
    return tiny(request.param)


@pytest.fixture
def vlm(parts: TinyParts) -> VLM:
    return VLM(parts.network, parts.processor.banned_ids)
