"""Settings of the vLLM engine: what it cannot do is refused before anything starts, by the name of the setting."""

from __future__ import annotations

import pytest

from fovea.config.backends import EmbeddedEngine, VllmEngine, VllmServersEngine
from fovea.config.loading import load_config
from fovea.errors import ConfigError

VLLM = ["model.tiny.hidden_size=64", "environment=shapes", "rollout.engine=vllm"]


def test_the_name_alone_chooses_it_and_the_embedded_engine_is_the_default() -> None:
    assert isinstance(load_config([], VLLM[:2]).rollout.engine, EmbeddedEngine)
    engine = load_config([], [*VLLM, "rollout.engine.kv_cache_gib=2", "rollout.engine.limit_mm_per_prompt.image=3"])
    assert isinstance(engine.rollout.engine, VllmEngine)
    assert engine.rollout.engine.limit_mm_per_prompt.image == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.top_p=0.9"], r"rollout\.top_p=0\.9 with rollout\.engine=vllm.*set rollout\.top_p=1, or"),
        (["rollout.top_k=20"], r"rollout\.top_k=20 with rollout\.engine=vllm.*set rollout\.top_k=0, or"),
        (["rollout.min_p=0.1"], r"rollout\.min_p=0\.1 with rollout\.engine=vllm"),
        (["rollout.temperature=3"], r"rollout\.temperature=3 with rollout\.engine=vllm.*between 0\.01 and 2"),
        (["rollout.engine.max_model_len=100"], r"max_model_len=100 is less than data\.max_prompt_tokens=2048.*to 2560"),
        (["rollout.engine.min_new_tokens=4"], r"min_new_tokens=4 draws.*importance_sampling_fix=true, or"),
        (
            ["rollout.engine.min_new_tokens=600", "algorithm.importance_sampling_fix=true"],
            r"min_new_tokens=600 is more than rollout\.max_new_tokens=512",
        ),
        (
            ["rollout.engine.ignore_eos=true", "rollout.stop_after_answer=true"],
            r"stop_after_answer=true ends completions that .*ignore_eos make go on; set .*ignore_eos=false",
        ),
        (["rollout.engine.repetition_penalty=1.1"], r"repetition_penalty is not a setting here: .*; remove it"),
        (
            ["rollout.engine.data_parallel_size=2"],
            r"data_parallel_size is not a setting here: every worker has a separate engine",
        ),
        (["rollout.engine.decode_weights=int8"], r"decode_weights: a setting of rollout\.engine\.name=embedded only"),
        (["rollout.engine.gpu_memory_utilisation=0.4"], r"did you mean rollout\.engine\.gpu_memory_utilization"),
    ],
)
def test_what_it_cannot_do_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([], [*VLLM, *overrides])


def test_a_shortest_completion_is_allowed_with_importance_weights() -> None:
    words = ["rollout.engine.min_new_tokens=4", "algorithm.importance_sampling_fix=true"]
    assert load_config([], [*VLLM, *words]).rollout.engine.name == "vllm"


SERVERS = [
    "rollout.engine=vllm_servers",
    "rollout.engine.weights_dir=w",
    "rollout.engine.servers=[http://a:1, http://b:2]",
]


def test_servers_are_a_member_of_their_own() -> None:
    config = load_config([], [*VLLM[:2], *SERVERS])
    assert isinstance(config.rollout.engine, VllmServersEngine)
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        load_config([], [*VLLM[:2], *SERVERS, "rollout.engine.gpu_memory_utilization=0.5"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rollout.top_p=0.9", "rollout.top_p=0.9 with rollout.engine=vllm_servers, whose log-probs"),
        ("rollout.temperature=5", "which samples between 0.01 and 2"),
        ("rollout.engine.servers=[http://a:1, http://a:1]", "names http://a:1 twice"),
        ("rollout.engine.servers=[]", "rollout.engine.servers"),
        ("rollout.engine.servers=[http://me:secret@a:1]", "rollout.engine.servers"),
    ],
)
def test_servers_that_cannot_train_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([], [*VLLM[:2], *SERVERS, setting])
