"""A policy's own export: its present weights, as transformers reads them."""

from __future__ import annotations

from pathlib import Path

import torch

from fovea.config.run import Model
from fovea.models.load import load_network
from tests.policies import make_batch, make_policy
from tests.tiny_models import tiny


def test_an_exported_policy_is_read_by_transformers(tmp_path: Path) -> None:
    parts = tiny("qwen3_vl")
    policy = make_policy(parts, lr_warmup_steps=0)
    policy.update(make_batch(parts))
    policy.export(tmp_path)
    reloaded = dict(load_network(Model(path=str(tmp_path))).named_parameters())
    trained = dict(parts.network.named_parameters())
    assert reloaded.keys() == trained.keys()
    assert all(torch.equal(reloaded[name], trained[name]) for name in trained)
