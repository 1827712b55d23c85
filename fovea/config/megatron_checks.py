"""Settings that training by Megatron does not go with."""

from __future__ import annotations

from collections.abc import Iterator

from fovea.config.algorithm import Algorithm
from fovea.config.backends import MegatronBackend
from fovea.config.model import Model
from fovea.config.sections import Cluster, Train

ONE_RATE = "its optimizer has one learning rate for all weights"


def megatron_complaints(train: Train, model: Model, algorithm: Algorithm, cluster: Cluster) -> Iterator[str]:
    """Complaints about train.backend=megatron; none where it is another."""
    if not isinstance(train.backend, MegatronBackend):
        return
    if train.backend.sequence_parallel and train.backend.tensor_parallel_size == 1:
        yield (
            "train.backend.sequence_parallel=true with train.backend.tensor_parallel_size=1: tokens are divided among "
            "the GPUs that a layer is split over; set tensor_parallel_size, or leave sequence_parallel out"
        )
    lora, tensor = model.lora, train.backend.tensor_parallel_size
    if lora is not None and lora.rank % tensor:
        yield (
            f"model.lora.rank={lora.rank} with train.backend.tensor_parallel_size={tensor}: the rows of an adapter are "
            f"divided too; set the rank to a multiple of {tensor}"
        )
    refused = {
        "model.lora.dropout": lora is not None and lora.dropout > 0 and "it has one draw for each copy of a prompt",
        "model.lora.parts": lora is not None
        and lora.parts != ("language_model",)
        and "its adapters are on the language model",
        "algorithm.advantage.critic.trunk=separate": algorithm.critic is not None
        and algorithm.critic.trunk == "separate"
        and "its value function is a head on the policy's states",
        f"cluster.placement={cluster.placement}": cluster.placement != "collocated"
        and "its process groups are those of all processes, of which some would not train",
        "model.feature_spill_gib": model.feature_spill_gib > 0 and "it keeps no features of a frozen vision tower",
        "train.gradient_checkpointing=selective": train.gradient_checkpointing == "selective"
        and "it computes whole layers again (full) or none",
        "train.vision_tower_learning_rate": train.vision_tower_learning_rate is not None and ONE_RATE,
        "train.projector_learning_rate": train.projector_learning_rate is not None and ONE_RATE,
        "train.variable_seq_lengths=false": not train.variable_seq_lengths and "its rows are packed without padding",
    }
    for setting, reason in refused.items():
        if reason:
            yield f"{setting} with train.backend=megatron: {reason}; change either, or set train.backend=torch"
