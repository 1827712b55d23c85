"""Settings of engines, trainers and cluster: what they cannot do is refused before anything starts, by name."""

from __future__ import annotations

import pytest

from fovea.cluster.placement import Placement
from fovea.config.backends import EmbeddedSettings, MegatronBackend, SglangSettings, VllmServersSettings, VllmSettings
from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.config.sections import Cluster
from fovea_gym.errors import ConfigError
from gym_tests.tables import table

SERVERS = (
    *("rollout.engine=vllm_servers", "rollout.engine.weights_dir=w"),
    "rollout.engine.servers=[http://a:1, http://b:2]",
)
VLLM, SGLANG = ("rollout.engine=vllm",), ("rollout.engine=sglang",)
MEGATRON = ("train.backend.name=megatron",)
ENGINE, FIX = "rollout.engine", "algorithm.importance_sampling_fix=true"


def load(*words: str) -> Config:
    return load_config([], ["model.tiny.hidden_size=64", "environment=shapes", *words])


def test_names_choose_the_engine_and_the_backend() -> None:
    assert isinstance(load().rollout.engine, EmbeddedSettings)
    vllm = load(*VLLM, "rollout.engine.kv_cache_gib=2", "rollout.engine.limit_mm_per_prompt.image=3").rollout.engine
    assert isinstance(vllm, VllmSettings)
    assert vllm.limit_mm_per_prompt.image == 3
    assert load(*VLLM, "rollout.engine.min_new_tokens=4", FIX).rollout.engine.name == "vllm"
    sampling = ("rollout.top_p=0.9", "rollout.top_k=20", "rollout.temperature=3")
    sglang = load(*SGLANG, "rollout.engine.max_total_tokens=5000", *sampling).rollout.engine
    assert isinstance(sglang, SglangSettings)
    assert sglang.max_total_tokens == 5000
    assert isinstance(load(*SERVERS).rollout.engine, VllmServersSettings)
    sizes = ("train.backend.tensor_parallel_size=2", "train.backend.sequence_parallel=true")
    backend = MegatronBackend(tensor_parallel_size=2, sequence_parallel=True, pipeline_parallel_size=1)
    assert load(*MEGATRON, *sizes).train.backend == backend


@table(
    ("base", "words", "message"),
    [
        (VLLM, "rollout.top_p=0.9", r"rollout\.top_p=0\.9 with rollout\.engine=vllm.*set rollout\.top_p=1, or"),
        (VLLM, "rollout.top_k=20", r"rollout\.top_k=20 with rollout\.engine=vllm.*set rollout\.top_k=0, or"),
        (VLLM, "rollout.min_p=0.1", r"rollout\.min_p=0\.1 with rollout\.engine=vllm"),
        (VLLM, "rollout.temperature=3", r"temperature=3 with rollout\.engine=vllm.*between 0\.01 and 2"),
        (VLLM, f"{ENGINE}.max_model_len=100", r"=100 is less than data\.max_prompt_tokens=2048.*to 2560"),
        (VLLM, f"{ENGINE}.min_new_tokens=4", r"min_new_tokens=4 samples.*importance_sampling_fix=true, or"),
        (VLLM, f"{ENGINE}.min_new_tokens=600 {FIX}", r"_tokens=600 is more than rollout\.max_new_tokens=512"),
        (
            VLLM,
            f"{ENGINE}.min_new_tokens=4 rollout.stop_after_answer=true",
            r"stop_after_answer=true .*min_new_tokens=0",
        ),
        (VLLM, f"{ENGINE}.repetition_penalty=1.1", r"repetition_penalty is not a setting here: .*; remove it"),
        (VLLM, f"{ENGINE}.data_parallel_size=2", r"is not a setting here: every worker has a separate engine"),
        (VLLM, f"{ENGINE}.decode_weights=int8", r"decode_weights: a setting of .*\.name=embedded only"),
        (VLLM, f"{ENGINE}.gpu_memory_utilisation=0.4", r"did you mean rollout\.engine\.gpu_memory_utilization"),
        (SERVERS, f"{ENGINE}.gpu_memory_utilization=0.5", "gpu_memory_utilization"),
        (SERVERS, "rollout.top_p=0.9", "rollout.top_p=0.9 with rollout.engine=vllm_servers, whose log-probs"),
        (SERVERS, "rollout.temperature=5", "which samples between 0.01 and 2"),
        (SERVERS, f"{ENGINE}.servers=[http://a:1,http://a:1]", "lists http://a:1 twice"),
        (SERVERS, f"{ENGINE}.servers=[]", "rollout.engine.servers"),
        (SERVERS, f"{ENGINE}.servers=[http://me:secret@a:1]", "rollout.engine.servers"),
        (SGLANG, "rollout.min_p=0.1", r"rollout\.min_p=0\.1 with rollout\.engine=sglang.*set rollout\.min_p=0, or"),
        (SGLANG, f"{ENGINE}.min_new_tokens=4", r"min_new_tokens=4 samples.*importance_sampling_fix=true, or"),
        (SGLANG, f"{ENGINE}.kv_cache_gib=1", r"kv_cache_gib: a setting of rollout\.engine\.name=vllm only"),
        (MEGATRON, "model.lora.dropout=0.1", r"dropout with train\.backend=megatron: copies of a prompt would get"),
        (MEGATRON, "model.lora.rank=3 train.backend.tensor_parallel_size=2", r"model\.lora\.rank=3 .* a multiple of 2"),
        (
            MEGATRON,
            "algorithm.name=ppo algorithm.advantage.critic.trunk=separate",
            r"critic\.trunk=separate with .*head",
        ),
        (MEGATRON, "cluster.placement=disaggregated cluster.rollout_gpus=1", r"disaggregated with .*process groups"),
        (MEGATRON, "cluster.placement=hybrid cluster.rollout_gpus=1", "placement=hybrid with .*process groups"),
        (MEGATRON, "train.gradient_checkpointing=selective", r"=selective with .*\(full\) or none"),
        (MEGATRON, "model.lora.parts=vision_tower", r"lora\.parts with "),
        (MEGATRON, "train.projector_learning_rate=1e-5", r"projector_learning_rate with "),
        (MEGATRON, "train.backend.replicas=2", r"train\.backend\.replicas: .*\.name=torch\b"),
        (MEGATRON, "train.backend.sequence_parallel=true", r"sequence_parallel=true with .*tensor_parallel_size=1"),
        ((), "cluster.num_nodes=2", r"cluster\.num_nodes=2\b.*\bRay\b"),
        ((), "cluster.rollout_gpus=1", r"cluster\.rollout_gpus=1\b"),
        ((), "cluster.placement=disaggregated", r"placement=disaggregated\b"),
        ((), "cluster.placement=hybrid", r"cluster\.placement=hybrid\b"),
        (("cluster={placement: hybrid, rollout_gpus: 4, num_nodes: 2, gpus_per_node: 2}",), "", r"rollout_gpus=4\b"),
    ],
)
def test_what_cannot_be_done_is_refused(base: tuple[str, ...], words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*base, *words.split())


def test_the_last_workers_hold_an_engine_alone() -> None:
    workers = [0, 1, 2, 3]
    alone = {"rollout_gpus": 1}
    clusters = (Cluster(), Cluster(placement="disaggregated", **alone), Cluster(placement="hybrid", **alone))
    placements = [Placement.of(cluster, len(workers)) for cluster in clusters]
    held = [(placement.learners(workers), placement.engines(workers)) for placement in placements]
    assert held == [(workers, workers), ([0, 1, 2], [3]), ([0, 1, 2], workers)]


def test_learners_are_some_and_divided_by_replicas() -> None:
    cluster = Cluster(placement="disaggregated", rollout_gpus=2)
    assert Placement.of(cluster, 8, replicas=3).replicas == 3
    with pytest.raises(ConfigError, match=r"replicas=4\b.*\b1, 2, 3 or 6$"):
        Placement.of(cluster, 8, replicas=4)
    with pytest.raises(ConfigError, match="there are 1 processes in all, so none would train"):
        Placement.of(Cluster(placement="disaggregated", rollout_gpus=1), 1)
