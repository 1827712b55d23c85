"""Which workers train and which generate."""

from __future__ import annotations

import pytest

from fovea.build.backends import _placement
from fovea.config.run import Config
from fovea.errors import ConfigError


@pytest.mark.parametrize(
    ("backend", "advice"),
    [("torch", r"cluster\.rollout_gpus=1"), ("megatron", r"rollout\.engine=vllm.*rollout\.engine\.python")],
)
def test_servers_want_one_leader(backend: str, advice: str) -> None:
    engine = {"name": "vllm_servers", "servers": ("http://127.0.0.1:8000",), "weights_dir": "weights"}
    config = Config.model_validate(
        {
            "model": {"path": "models/any"},
            "rollout": {"engine": engine},
            "train": {"backend": {"name": backend}},
        }
    )
    with pytest.raises(ConfigError, match=rf"vllm_servers with 2 workers.*{advice}"):
        _placement(config, 2)
