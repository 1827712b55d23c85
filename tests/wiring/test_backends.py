"""Which workers train and which generate, and what those on Ray are told."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fovea.config.run import Config
from fovea.errors import ConfigError
from fovea.models.processor import load_processor
from fovea.wiring.backends import open_backends, placement_of
from tests.tiny_models import save, tiny


@pytest.mark.parametrize(
    ("backend", "advice"),
    [("torch", r"cluster\.rollout_gpus=1"), ("megatron", r"rollout\.engine=vllm.*rollout\.engine\.python")],
)
def test_servers_want_one_leader(backend: str, advice: str) -> None:
    engine = {"name": "vllm_servers", "servers": ("http://127.0.0.1:8000",), "weights_dir": "weights"}
    config = Config.model_validate(
        {"model": {"path": "models/any"}, "rollout": {"engine": engine}, "train": {"backend": {"name": backend}}}
    )
    with pytest.raises(ConfigError, match=rf"vllm_servers with 2 workers.*{advice}"):
        placement_of(config, 2)


@pytest.mark.parametrize(
    ("python", "there"),
    [("env/bin/python", "{here}/env/bin/python"), ("python", "python"), ("~/bin/py", "{home}/bin/py")],
)
def test_workers_on_ray_get_an_interpreter_that_they_find(
    python: str, there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have another working directory; where the link to an interpreter leads is not an environment."""
    monkeypatch.chdir(tmp_path)
    Path("env/bin").mkdir(parents=True)
    Path("env/bin/python").symlink_to("/bin/sh")

    class Stopped(Exception):
        """Instead of a cluster."""

    def stop(_: Any, make: partial[Any], **__: Any) -> None:
        raise Stopped(make.args[0].config.rollout.engine.python)

    for name in ("use_token", "own_ray_on_loopback"):
        monkeypatch.setattr(f"fovea.wiring.backends.{name}", lambda: None)
    ray = SimpleNamespace(RayWorkers=stop)
    monkeypatch.setattr("fovea.wiring.backends.importlib", SimpleNamespace(import_module=lambda _: ray))
    config = Config.model_validate(
        {
            "model": {"path": str(save(tiny("qwen3_vl"), tmp_path / "model"))},
            "rollout": {"engine": {"name": "vllm", "python": python}},
            "cluster": {"gpus_per_node": 1},
        }
    )
    with pytest.raises(Stopped) as stopped:
        open_backends(config, config.model, load_processor(config.model))
    assert str(stopped.value) == there.format(here=os.getcwd(), home=Path.home())
