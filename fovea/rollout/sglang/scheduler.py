"""Extensions of SGLang's scheduler processes: seeded sampling, and comparison of weights.

SGLang samples by a request's seed only together with batch-invariant kernels (`enable_deterministic_inference`), which
are slower and need a GPU. Its sampler also supports seeds without them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor, nn

from fovea.rollout.sglang.weights import Sent, plain_name
from fovea.utils.checksum import read_hashes, value_hash

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused linear layers of SGLang, with their parts in the order in which SGLang stacks the rows."""
EXPERTS: Mapping[str, str] = {
    ".experts.gate_up_proj": ".experts.w13_weight",
    ".experts.down_proj": ".experts.w2_weight",
}
"""Names of experts in files and in SGLang; their values are not compared, since each kernel has its own layout."""


class FusedWeight(NamedTuple):
    """Location of a checkpoint's weight in SGLang's parameters."""

    parameter: str
    number: int
    """Index of the weight among those that are fused into this parameter."""


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """Main function of a scheduler process."""
    _draw_by_seed()
    Scheduler.compare = compare
    run_scheduler_process(*arguments, **named)


def _draw_by_seed() -> None:
    """Patch SGLang so that the sampler gets the requests' seeds in every batch."""
    make = SamplingBatchInfo.from_schedule_batch.__func__

    def with_seeds(cls: type[SamplingBatchInfo], batch: Any, vocab_size: int) -> SamplingBatchInfo:
        made: SamplingBatchInfo = make(cls, batch, vocab_size)
        # SGLang's internal requests, such as its warm-up, have no seed
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        made.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
        return made

    SamplingBatchInfo.from_schedule_batch = classmethod(with_seeds)


def compare(self: Any, sent: str) -> None:
    """A method added to schedulers: raise RuntimeError unless the model holds exactly these weights.

    `sent` is JSON and maps names in the checkpoint to the fields of `Sent`. With several workers, each compares the
    parameters that are not sharded.
    """
    model = self.tp_worker.model_runner.model
    expected = {name: Sent(*fields) for name, fields in json.loads(sent).items()}
    found = differences(model, expected, next(model.parameters()).dtype)
    group = self.tp_group.cpu_group
    of_all: list[str | None] = [None] * dist.get_world_size(group)
    # gathered, since only the first worker's result reaches the trainer
    dist.all_gather_object(of_all, found, group=group)
    if any(of_all):
        raise RuntimeError(next(text for text in of_all if text))


def differences(model: nn.Module, expected: Mapping[str, Sent], dtype: torch.dtype) -> str:
    """Describe how the model differs from the weights that were sent; "" if it does not."""
    parameters = dict(model.named_parameters())
    places = {name: place(name, parameters) for name in expected}
    unknown = [name for name, at in places.items() if at is None]
    untouched = parameters.keys() - {at.parameter for at in places.values() if at} - {"lm_head.weight"}
    if unknown or untouched:
        return (
            f"SGLang has no parameter for {len(unknown)} of the weights sent{_first(unknown)}, and {len(untouched)} of "
            f"its parameters received no weight{_first(untouched)}; it runs another model than the trainer"
        )
    held = {name: value_hash(weight, dtype) for name, weight in _held(parameters, places, expected)}
    (hashes,) = read_hashes(list(held.values()))
    differing = [name for name, bits in zip(held, hashes, strict=True) if bits != expected[name].bits]
    if differing:
        return f"{len(differing)} weights differ between trainer and SGLang after a weight sync{_first(differing)}"
    return ""


def place(name: str, parameters: Mapping[str, Tensor]) -> FusedWeight | None:
    """Find a checkpoint's weight in SGLang's parameters; None if the model has no such weight."""
    name = plain_name(name).replace(".attn.qkv.", ".attn.qkv_proj.")
    for part, held in EXPERTS.items():
        name = name.replace(part, held)
    if name in parameters:
        return FusedWeight(name, 0)
    for fused, parts in FUSED.items():
        for number, part in enumerate(parts):
            candidate = name.replace(f".{part}.", f".{fused}.")
            if candidate != name and candidate in parameters:
                return FusedWeight(candidate, number)
    return None


def _held(
    parameters: Mapping[str, Tensor], places: Mapping[str, FusedWeight | None], expected: Mapping[str, Sent]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight as a slice of the parameter that contains it, for parameters that are not sharded."""
    in_order = sorted(
        (at.parameter, at.number, name)
        for name, at in places.items()
        if at and not at.parameter.endswith(tuple(EXPERTS.values()))
    )
    rows: dict[str, int] = {}
    for parameter, _, name in in_order:
        rows[parameter] = rows.get(parameter, 0) + expected[name].num_rows
    start, before = 0, ""
    for parameter, _, name in in_order:
        start = start if parameter == before else 0
        end = start + expected[name].num_rows
        held = parameters[parameter][start:end]
        # an embedding may have more rows, as padding; a shard has fewer rows or columns than the weight sent
        if len(parameters[parameter]) >= rows[parameter] and held.numel() == expected[name].num_values:
            yield name, held
        start, before = end, parameter


def _first(names: Any) -> str:
    return f", first {min(names)}" if names else ""
