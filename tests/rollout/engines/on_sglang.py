"""SGLang in the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from fovea.config.backends import SglangSettings
from fovea.config.model import Model
from fovea.rollout.sglang import weights as weights_module
from fovea.rollout.sglang.arguments import make_engine, server_arguments
from fovea.rollout.sglang.engine import SglangEngine
from tests.process_groups import members
from tests.rollout.engines.under_test import EngineUnderTest

SCHEDULER = "scheduler"
"""Part of the title of processes that hold the model."""


def arguments(engine_args: dict[str, Any], device: str = "cpu", **settings: Any) -> dict[str, Any]:
    made = SglangSettings(engine_args=engine_args, **settings)
    return server_arguments(made, Model(path="x"), max_model_len=100, seed=3, device=torch.device(device))


def workers(engine: SglangEngine) -> list[psutil.Process]:
    found = [each for each in members(engine.process.pid) if SCHEDULER in " ".join(each.cmdline())]
    return sorted(found, key=lambda each: each.cmdline())


def damage(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    handles = weights_module.handles

    def damaged(tensors: Sequence[tuple[str, Tensor]]) -> bytes:
        copies = [(name, tensor.clone()) for name, tensor in tensors]
        for name, tensor in copies:
            tensor.view(-1)[5] += 1e-3 * name.endswith(ending)
        return handles(copies)

    monkeypatch.setattr(weights_module, "handles", damaged)


ENGINE = EngineUnderTest(
    name="sglang",
    title="SGLang",
    make=make_engine,
    section=SglangSettings,
    arguments=arguments,
    refused={
        "page_sise": r"engine_args\.page_sise: SGLang has no such engine argument; did you mean page_size",
        "tp_size": r"engine_args\.tp_size: this .* has its own setting; set rollout\.engine\.tensor_parallel_size",
        "sampling_backend": "sampling_backend: Fovea sets it to 'pytorch'.*remove it",
    },
    # SGLang has Qwen2.5-VL with this size of patches only
    models={"qwen2_5_vl": {"patch_size_px": 14}},
    # it binds every rank to cores of a CPU: more than one on this one only by name
    sharded_environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|0"},
    lost="SGLang has ended: .*; its log is ",
    workers=workers,
    damage=damage,
    launchers=("ray",),
    processes_of_run=(SCHEDULER, "trainer"),
)
