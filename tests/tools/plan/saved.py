"""Plans of small models, and the activations that autograd keeps of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.torch_memory import AllocationTrace
from fovea.config.run import Config
from fovea.models.shared_prefix.layout import PackedRow
from fovea.models.vlm import VLM
from fovea.train.packing import pack_row
from fovea.train.update import TrainedPolicy
from fovea.types import Batch, Prompt
from fovea_tools.plan.activations import Numerics
from fovea_tools.plan.memory import row_stages
from fovea_tools.plan.model_sizes import model_sizes
from fovea_tools.plan.workload import roles_of, workload_of
from tests.tiny_models import CPU

GROUPS, SAMPLES, TOKENS = 6, 4, 12


def config_for(folder: Path, prompt_tokens: int, image_tokens: int, tokens: int = TOKENS, **train: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(folder)},
            "rollout": {"prompts_per_step": GROUPS, "samples_per_prompt": SAMPLES, "max_new_tokens": tokens},
            "plan": {"gpu": "cpu", "gpus": 1, "prompt_tokens": prompt_tokens, "image_tokens": image_tokens},
            "train": {"max_tokens_per_microbatch": 10**6, **train},
        }
    )


def measured_and_planned(
    vlm: VLM, prompts: Sequence[Prompt], folder: Path, tokens: int = TOKENS, **train: object
) -> tuple[int, int]:
    """Bytes of activations of a row with groups of these prompts: those that autograd keeps, and those of the plan."""
    unequal = [np.full(tokens, 5 + number) for number in range(SAMPLES)]  # a plan counts on no equal ones
    row = pack_row(vlm.family, prompts, [unequal] * GROUPS, CPU)
    config = config_for(folder, prompts[0].num_tokens, prompts[0].images[0].num_tokens, tokens, **train)
    sizes = model_sizes(config)
    (shape,) = workload_of(config, sizes, roles_of(config, 1)).distinct_rows
    assert (shape.tokens, shape.actions) == (row.num_tokens, row.num_actions)
    stages = row_stages(config, sizes, shape, Numerics.of(config, cuda=False))
    return _saved_bytes(vlm, row), sum(stage.saved for stage in stages)


def peak_of_update(policy: TrainedPolicy, batch: Batch) -> int:
    """Most bytes of an update's tensors beyond those that are there before it: weights and moments, among others."""
    policy.update(batch)
    trace = AllocationTrace()
    trace.start()
    with torch.profiler.record_function("update"):
        policy.update(batch)
    trace.stop()
    (peak,) = trace.peaks(["update"])["update"]
    return peak - trace.before


def _saved_bytes(vlm: VLM, row: PackedRow) -> int:
    """Bytes that autograd keeps of a row beside the weights."""
    kept: dict[int, UntypedStorage] = {}

    def count(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        vlm(row, temperature=1.0, chunk_tokens=10**6)
    weights = {parameter.untyped_storage().data_ptr() for parameter in vlm.parameters()}
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in weights)
