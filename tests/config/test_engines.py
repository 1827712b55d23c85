"""Settings of engines and cluster: what they cannot do is refused before anything starts, by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from fovea.cluster.placement import Placement
from fovea.config.backends import EmbeddedSettings, SglangSettings, VllmServersSettings, VllmSettings
from fovea.config.loading import load_config
from fovea.config.sections import Cluster
from fovea.errors import ConfigError

VLLM = ["model.tiny.hidden_size=64", "environment=shapes", "rollout.engine=vllm"]


def test_the_name_alone_chooses_it_and_the_embedded_engine_is_the_default() -> None:
    assert isinstance(load_config([], VLLM[:2]).rollout.engine, EmbeddedSettings)
    engine = load_config([], [*VLLM, "rollout.engine.kv_cache_gib=2", "rollout.engine.limit_mm_per_prompt.image=3"])
    assert isinstance(engine.rollout.engine, VllmSettings)
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
            ["rollout.engine.min_new_tokens=4", "rollout.stop_after_answer=true"],
            r"stop_after_answer=true ends completions that .*min_new_tokens makes go on; set .*min_new_tokens=0",
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
    assert isinstance(config.rollout.engine, VllmServersSettings)
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


SGLANG = ["model.tiny.hidden_size=64", "environment=shapes", "rollout.engine=sglang"]


def test_the_name_alone_chooses_it_and_what_it_can_do_is_allowed() -> None:
    words = ["rollout.engine.max_total_tokens=5000", "rollout.top_p=0.9", "rollout.top_k=20", "rollout.temperature=3"]
    engine = load_config([], [*SGLANG, *words]).rollout.engine
    assert isinstance(engine, SglangSettings)
    assert engine.max_total_tokens == 5000


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.min_p=0.1"], r"rollout\.min_p=0\.1 with rollout\.engine=sglang.*set rollout\.min_p=0, or"),
        (["rollout.engine.max_model_len=100"], r"max_model_len=100 is less than data\.max_prompt_tokens=2048.*to 2560"),
        (["rollout.engine.min_new_tokens=4"], r"min_new_tokens=4 draws.*importance_sampling_fix=true, or"),
        (["rollout.engine.kv_cache_gib=1"], r"kv_cache_gib: a setting of rollout\.engine\.name=vllm only"),
    ],
)
def test_what_sglang_cannot_do_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([], [*SGLANG, *overrides])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_nodes": 2}, "cluster.num_nodes=2 needs Ray"),
        ({"rollout_gpus": 1}, "cluster.rollout_gpus=1 are only to generate"),
        ({"placement": "disaggregated"}, "cluster.placement=disaggregated needs GPUs that only generate"),
        ({"placement": "hybrid"}, "cluster.placement=hybrid needs GPUs that only generate"),
        (
            {"placement": "hybrid", "rollout_gpus": 4, "num_nodes": 2, "gpus_per_node": 2},
            "cluster.rollout_gpus=4 leaves none of 4 GPUs to train",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Cluster(**settings)


def test_the_last_workers_hold_an_engine_alone() -> None:
    workers = [0, 1, 2, 3]
    held = {
        cluster.placement: (placement.learners(workers), placement.engines(workers))
        for cluster in (
            Cluster(),
            Cluster(placement="disaggregated", rollout_gpus=1),
            Cluster(placement="hybrid", rollout_gpus=1),
        )
        for placement in [Placement.of(cluster, len(workers))]
    }
    assert held == {"collocated": (workers, workers), "disaggregated": ([0, 1, 2], [3]), "hybrid": ([0, 1, 2], workers)}


def test_replicas_are_of_learners_alone_and_of_equal_size() -> None:
    cluster = Cluster(placement="disaggregated", rollout_gpus=2)
    assert Placement.of(cluster, 8, replicas=3).replicas == 3
    with pytest.raises(ConfigError, match=r"replicas=4 does not divide .* processes, 6; set it to 1, 2, 3 or 6$"):
        Placement.of(cluster, 8, replicas=4)


def test_processes_that_would_all_generate_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are 1 processes, so that none trains"):
        Placement.of(Cluster(placement="disaggregated", rollout_gpus=1), 1)
