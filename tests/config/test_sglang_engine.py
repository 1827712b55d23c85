"""Settings of the SGLang engine: what it cannot do is refused before anything starts, by the name of the setting."""

from __future__ import annotations

import pytest

from fovea.config.backends import SglangEngine
from fovea.config.loading import load_config
from fovea.errors import ConfigError

SGLANG = ["model.tiny.hidden_size=64", "environment=shapes", "rollout.engine=sglang"]


def test_the_name_alone_chooses_it_and_what_it_can_do_is_allowed() -> None:
    words = ["rollout.engine.max_total_tokens=5000", "rollout.top_p=0.9", "rollout.top_k=20", "rollout.temperature=3"]
    engine = load_config([], [*SGLANG, *words]).rollout.engine
    assert isinstance(engine, SglangEngine)
    assert engine.max_total_tokens == 5000


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.min_p=0.1"], r"rollout\.min_p=0\.1 with rollout\.engine=sglang.*set rollout\.min_p=0, or"),
        (["rollout.engine.max_model_len=100"], r"max_model_len=100 is less than data\.max_prompt_tokens=2048.*to 2560"),
        (["rollout.engine.min_new_tokens=4"], r"min_new_tokens=4 draws.*importance_sampling_fix=true, or"),
        (["rollout.engine.repetition_penalty=1.1"], r"repetition_penalty is not a setting here: .*; remove it"),
        (
            ["rollout.engine.data_parallel_size=2"],
            r"data_parallel_size is not a setting here: every worker has a separate engine",
        ),
        (["rollout.engine.kv_cache_gib=1"], r"kv_cache_gib: a setting of rollout\.engine\.name=vllm only"),
    ],
)
def test_what_it_cannot_do_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([], [*SGLANG, *overrides])
