"""vLLM in the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from fovea.config.backends import VllmSettings
from fovea.config.model import Model
from fovea.rollout.vllm.arguments import engine_arguments, make_engine
from fovea.rollout.vllm.engine import VllmEngine
from fovea.rollout.vllm.worker import WeightReceiver
from fovea.utils.checksum import value_hash
from tests.rollout.engines.under_test import EngineUnderTest


def arguments(engine_args: dict[str, Any]) -> dict[str, Any]:
    return engine_arguments(VllmSettings(engine_args=engine_args), Model(path="x"), max_model_len=100, seed=3)


def workers(engine: VllmEngine) -> list[psutil.Process]:
    return [psutil.Process(each.proc.pid) for each in engine.llm.engine_core.engine_core.model_executor.workers]


def damage(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """Packed and fused weights are read back too; to the worker it looks as if it had got what was sent."""
    take = WeightReceiver.receive_weights

    def changed(name: str, weight: Tensor) -> Tensor:
        weight = weight.clone()
        weight.view(-1)[5] += 1e-3 * name.endswith(ending)
        return weight

    def damaging(self: WeightReceiver, weights: Sequence[tuple[str, Tensor]]) -> None:
        before = self.arrived
        take(self, [(name, changed(name, weight)) for name, weight in weights])
        self.arrived = [*before, *(value_hash(weight, torch.float32) for _, weight in weights)]

    monkeypatch.setattr(WeightReceiver, "receive_weights", damaging)


ENGINE = EngineUnderTest(
    name="vllm",
    title="vLLM",
    make=make_engine,
    section=VllmSettings,
    arguments=arguments,
    refused={
        "blok_size": r"engine_args\.blok_size: vLLM has no such engine argument; did you mean block_size",
        "max_num_seqs": r"engine_args\.max_num_seqs: this .* has its own setting; set rollout\.engine\.max_num_seqs",
        "logprobs_mode": "logprobs_mode: Fovea sets it to 'processed_logprobs'.*remove it",
        "device_ids": "device_ids: Fovea sets it",
    },
    small={"kv_cache_gib": 0.25, "enforce_eager": True},
    lost="a worker process of vLLM has ended",
    workers=workers,
    damage=damage,
    launchers=("torchrun", pytest.param("ray", marks=pytest.mark.long)),
    processes_of_run=("trainer",),
)
