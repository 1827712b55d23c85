"""`fovea plan` of Megatron against what its processes hold, and against what autograd keeps of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.torch_memory import AllocationTrace
from fovea.config.run import Config
from fovea.models.recompute import Recompute
from fovea.models.tiny import TinyParts
from fovea.train.base import Needs
from fovea.types import Batch, SampleGroup
from fovea_tools.plan.activations import Numerics
from fovea_tools.plan.megatron import held_states, update_peak
from fovea_tools.plan.model_sizes import model_sizes
from fovea_tools.plan.workload import Roles, roles_of, workload_of
from tests.process_ranks import found_by_ranks
from tests.records import sample_of
from tests.tiny_models import image, renderer, save, tiny, user
from tests.tools.plan.published import wide
from tests.train.megatron.equal_steps import SIZES, megatron_policy, settings_of

HELD = 0.01
"""Buffers of gradients are filled up to whole blocks."""
PEAK = 0.15
GROUPS, SAMPLES, TOKENS = 4, 3, 12
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
RECOMPUTED = [("qwen2_5_vl", "full"), ("qwen3_vl", "full")]
"""Not experts, whose backward pass takes more on a CPU than is planned (docs/megatron.md)."""
BACKENDS: list[tuple[str, dict[str, int]]] = [
    ("qwen3_vl", {}),
    ("qwen2_5_vl", {"tensor_parallel_size": 2}),
    ("qwen3_vl", {"tensor_parallel_size": 2}),
    ("qwen3_vl", {"pipeline_parallel_size": 2}),
    ("qwen3_vl_moe", {"expert_parallel_size": 2}),
    ("qwen3_vl_moe", {"pipeline_parallel_size": 2}),
    ("qwen3_vl_moe", {"expert_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True}),
]


def held_by(policy: Any) -> dict[str, int]:
    """Bytes of this process's slice of the model, of the buffers of its gradients and of its optimizer's states."""
    training = policy._training
    return {
        "parameters": sum(parameter.nbytes for parameter in policy._model.module.parameters()),
        "gradients": sum(each.grad_data.nbytes for each in (*training.buffers, *training.expert_parallel_buffers)),
        "optimizer": sum(state.nbytes for state in policy._optimizer.states()),
    }


def planned_states(config: Config, gpus: int, rank: int) -> dict[str, int]:
    roles = roles_of(config, gpus)
    numerics = Numerics.of(config, cuda=False)
    stages = {"shares": roles.shares, "stages": roles.stages, "stage": rank * roles.stages // gpus}
    of_rank = Roles(trainers=gpus, engines=gpus, apart=False, is_divided=True, **stages)
    states = held_states(config, model_sizes(config), of_rank, numerics).on_device
    return {part: states[part] for part in ("parameters", "gradients", "optimizer")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_that_a_process_holds(family: str, dtype: str, tmp_path: Path) -> None:
    folder = save(tiny(family, **SIZES), tmp_path)
    with megatron_policy(folder, model={"dtype": dtype}) as policy:
        measured = held_by(policy)
    config = settings_of(folder, model={"dtype": dtype}, train={"backend": {"name": "megatron"}})
    assert planned_states(config, 1, 0) == pytest.approx(measured, rel=HELD)


def test_states_are_those_that_each_of_two_processes_holds(tmp_path: Path) -> None:
    cases = [
        (save(tiny(family, **SIZES), tmp_path / str(number)), backend)
        for number, (family, backend) in enumerate(BACKENDS)
    ]
    for rank, measured in enumerate(found_by_ranks(_held_by_rank, cases, folder=tmp_path)):
        for (folder, backend), held in zip(cases, measured, strict=True):
            config = settings_of(folder, train={"backend": {"name": "megatron", **backend}})
            assert planned_states(config, 2, rank) == pytest.approx(held, rel=HELD), backend


def _held_by_rank(rank: int, cases: Sequence[tuple[Path, dict[str, int]]]) -> list[dict[str, int]]:
    held = []
    for model, backend in cases:
        with megatron_policy(model, **backend) as policy:
            held.append(held_by(policy))
    return held


def alike_groups(parts: TinyParts) -> Batch:
    """Groups of equal lengths with an image each, as a plan assumes them, of unequal completions."""
    prompts = [renderer(parts).prompt(user(image(seed, 64, 64), "How many circles?")) for seed in range(GROUPS)]
    samples = []
    for number in range(SAMPLES):
        given = {"rollout_logprobs_T": -5.0, "advantages_T": 1.0 - number}
        fields = {name: np.full(TOKENS, value, np.float32) for name, value in given.items()}
        samples.append(sample_of(np.full(TOKENS, 5 + number), weight=0.1, **fields))
    return Batch(groups=tuple(SampleGroup(prompt=prompt, samples=tuple(samples)) for prompt in prompts))


def planned_config(folder: Path, batch: Batch, how: Recompute) -> Config:
    """Settings whose plan has the micro-batches of this batch."""
    prompt = batch.groups[0].prompt
    plan = {"gpu": "cpu", "gpus": 1, "prompt_tokens": prompt.num_tokens, "completion_tokens": TOKENS}
    plan["image_tokens"] = prompt.images[0].num_tokens
    train = {"backend": {"name": "megatron"}, "gradient_checkpointing": how, "max_tokens_per_microbatch": 10**6}
    rollout = {"prompts_per_step": GROUPS, "samples_per_prompt": SAMPLES, "max_new_tokens": TOKENS}
    return settings_of(folder, train=train, rollout=rollout, plan=plan)


@pytest.mark.parametrize(("family", "how"), [*((family, "none") for family in FAMILIES), *RECOMPUTED])
def test_peak_of_the_passes_is_the_measured_one(
    family: str, how: Recompute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what autograd keeps and the temporaries beside it, by torch's allocator; weights and states are left out."""
    parts = tiny(family, **wide(family))
    folder, batch = save(parts, tmp_path), alike_groups(parts)
    with megatron_policy(folder, recompute=how, train={"max_tokens_per_microbatch": 10**6}) as policy:
        batch = policy.compute_logprobs(batch, Needs(old_logprobs=True, reference_logprobs=True, values=False))
        policy.update(batch)
        passes = policy._gradients
        monkeypatch.setattr(policy, "_gradients", torch.profiler.record_function("passes")(passes))
        trace = AllocationTrace()
        trace.start()
        policy.update(batch)
        trace.stop()
    # later minibatches find what waits for the garbage collector
    peak = trace.peaks(["passes"])["passes"][0]
    config = planned_config(folder, batch, how)
    sizes, roles, numerics = model_sizes(config), roles_of(config, 1), Numerics.of(config, cuda=False)
    planned = update_peak(config, sizes, workload_of(config, sizes, roles), roles, numerics).total()
    assert planned == pytest.approx(peak - trace.before, rel=PEAK)
