"""Settings of training by Megatron: what it cannot do is refused before anything starts, by the name of the setting."""

from __future__ import annotations

import pytest

from fovea.config.backends import MegatronBackend
from fovea.config.loading import load_config
from fovea.errors import ConfigError

MEGATRON = ["model.tiny.hidden_size=64", "environment=shapes", "warmup=null", "train.backend.name=megatron"]


def test_sizes_are_settings_of_the_backend() -> None:
    given = ["train.backend.tensor_parallel_size=2", "train.backend.sequence_parallel=true"]
    backend = load_config([], [*MEGATRON, *given]).train.backend
    assert backend == MegatronBackend(tensor_parallel_size=2, sequence_parallel=True, pipeline_parallel_size=1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.lora.dropout=0.1"],
            r"model\.lora\.dropout with train\.backend=megatron: it has one draw for each copy",
        ),
        (
            ["model.lora.rank=3", "train.backend.tensor_parallel_size=2"],
            r"model\.lora\.rank=3 with .*tensor_parallel_size=2: .*; set the rank to a multiple of 2",
        ),
        (
            ["algorithm.name=ppo", "algorithm.advantage.critic.trunk=separate"],
            r"algorithm\.advantage\.critic\.trunk=separate with .*: its value function is a head",
        ),
        (
            ["cluster.placement=disaggregated", "cluster.rollout_gpus=1"],
            r"cluster\.placement=disaggregated with .*process groups",
        ),
        (["cluster.placement=hybrid", "cluster.rollout_gpus=1"], r"cluster\.placement=hybrid with .*process groups"),
        (["train.gradient_checkpointing=selective"], r"gradient_checkpointing=selective with .*\(full\) or none"),
        (["model.lora.parts=vision_tower"], r"model\.lora\.parts with .*adapters are on the language model"),
        (["train.projector_learning_rate=1e-5"], r"train\.projector_learning_rate with .*one learning rate for all"),
        (["train.backend.replicas=2"], r"train\.backend\.replicas: a setting of train\.backend\.name=torch only"),
        (
            ["train.backend.sequence_parallel=true"],
            r"train\.backend\.sequence_parallel=true with .*tensor_parallel_size=1",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([], [*MEGATRON, *overrides])
