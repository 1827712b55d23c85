"""Lower bounds for the time of a step on this machine, from each part's operations and bytes and measured rates.

    python -m benchmarks.floors --case image_heavy --json floors.json

A part cannot be faster than its operations at the rate of large matrix products and of fused attention, nor faster than
reading its weights from memory. Decode steps multiply each weight with few rows, so their rate is measured with thin
products over weights as large as the model's. The rates are measured with torch's operators on this machine; a better
kernel could beat a floor. Norms, softmax, sampling and image processing have no floor.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import CASES, Case
from benchmarks.ours import Ours, config_of
from benchmarks.printing import as_table, show
from benchmarks.process import restart_with_tuned_malloc
from fovea.config.backends import EmbeddedSettings
from fovea.models.families.registry import family_of
from fovea.models.flops import FORWARD, Passes, Work, training_passes
from fovea.models.modules import language_model, vision_tower
from fovea.types import Prompt
from fovea_tools.probe.rates import BEYOND_CACHE_BYTES, Rates, best_seconds, measure_rates, read_rate

MODULE = "benchmarks.floors"
WARM_STEPS = 1
GIGA = 1e9
THIN_ROWS = 32
WEIGHT_SIDE = 1024
SHOWN_OPERATORS = 25
ATTENTION = Passes(linear=0, attention=1, vision=0, vision_attention=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The operations and bytes of one part of a phase."""

    phase: str
    name: str
    passes: float
    """Passes of the linear layers, in forward passes: a backward pass counts as 2, without weight gradients as 1."""
    linear: float
    """Number of operations of matrix products with weights."""
    attention: float
    bytes: float
    """Bytes of weights, gradients, optimizer state and KV cache that pass through memory."""
    thin: bool = False
    """True if the matrix products have few rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """The rates of this machine, measured for a case."""

    large: Rates
    thin_gemm: float
    """Rate of matrix products with one row per completion, with weights as large as the language model's."""
    weight_read: float
    """Rate of reading as many bytes as the language model's weights have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the model and the prompts, from which operations and bytes are computed."""

    work: Work
    prompts: tuple[Prompt, ...]
    text_bytes: int
    vision_bytes: int
    trained_bytes: int
    kv_bytes: int
    """Bytes per token in the KV cache."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    if arguments is None:
        restart_with_tuned_malloc(MODULE)
    torch.set_num_threads(1)
    case = CASES[options.case]
    ours = Ours(case, WARM_STEPS + options.steps + 1)
    sizes = sizes_of(case, ours)
    thin = thin_gemm_rate(_rows(case), sizes.text_bytes)
    rates = MachineRates(large=measure_rates(), thin_gemm=thin, weight_read=read_rate(sizes.text_bytes))
    parts = parts_of(case, sizes, reuses=reuses_rollout(case))
    measured = _measured(ours, options.steps)
    show(_rate_table(rates), _part_table(parts, rates), phase_table(parts, rates, measured))
    if options.operators:
        show(_operator_table(ours))
    if options.json:
        found = {"rates": asdict(rates), "parts": [asdict(p) for p in parts], "measured_seconds": measured}
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.split("\n")[0])
    parser.add_argument("--case", choices=CASES, default="image_heavy")
    parser.add_argument("--steps", type=int, default=3, help="number of timed steps")
    parser.add_argument(
        "--operators", action="store_true", help="also profile the operators of one more step with torch's profiler"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args(arguments)


def sizes_of(case: Case, ours: Ours) -> Sizes:
    network = ours.shared.parts.network
    text = ours.shared.vlm.text_config
    width = next(network.parameters()).element_size()
    return Sizes(
        work=family_of(network.config, "").work,
        prompts=tuple(ours.prompts(case.prompts)),
        text_bytes=_num_bytes(language_model(network).parameters()),
        vision_bytes=_num_bytes(vision_tower(network).parameters()),
        trained_bytes=_num_bytes(parameter for parameter in network.parameters() if parameter.requires_grad),
        kv_bytes=2 * width * text.num_hidden_layers * text.num_key_value_heads * text.head_dim,
    )


def _num_bytes(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def reuses_rollout(case: Case) -> bool:
    """True if the update reuses linear outputs and image features from the rollout."""
    config = config_of(case)
    engine = config.rollout.engine
    assert isinstance(engine, EmbeddedSettings), f"this benchmark needs the embedded engine, not {engine.name}"
    return engine.reuse_gib > 0 and config.train.gradient_checkpointing == "none"


def parts_of(case: Case, sizes: Sizes, *, reuses: bool) -> list[Part]:
    """The parts of a step: encoding, prefill and decoding in the rollout; forward, backward and AdamW in the update."""
    trains_vision = not case.freeze_vision and case.lora_rank is None
    passes = training_passes(
        lora=case.lora_rank is not None, trains_vision=trains_vision, features_cached=not trains_vision
    )
    made = passes
    if reuses:
        vision, attention = (max(each - 1, 0) for each in (passes.vision, passes.vision_attention))
        made = replace(passes, linear=passes.linear - 1, vision=vision, vision_attention=attention)
    return [
        _vision("rollout", sizes, FORWARD),
        _prompts("rollout", sizes, FORWARD),
        _decode(case, sizes),
        _vision("update", sizes, made),
        _prompts("update", sizes, made),
        _completions(case, sizes, made),
        _head(case, sizes, made),
        # AdamW reads weight, gradient and two moments, and writes all but the gradient
        Part(phase="update", name="AdamW", passes=0, linear=0, attention=0, bytes=7 * sizes.trained_bytes),
    ]


def _vision(phase: str, sizes: Sizes, passes: Passes) -> Part:
    images = [image for prompt in sizes.prompts for image in prompt.images]
    patches = sum(len(image.tensors["pixel_values"]) for image in images)
    linear = patches * sizes.work.patch
    return Part(
        phase=phase,
        name="vision",
        passes=passes.vision,
        linear=passes.vision * linear,
        attention=passes.vision_attention * (sum(sizes.work.image(image) for image in images) - linear),
        bytes=passes.vision * sizes.vision_bytes,
    )


def _prompts(phase: str, sizes: Sizes, passes: Passes) -> Part:
    tokens = [prompt.num_tokens for prompt in sizes.prompts]
    pairs = sum(sizes.work.prompt(n, [], ATTENTION) for n in tokens)
    return Part(
        phase=phase,
        name="prompts",
        passes=passes.linear,
        linear=passes.linear * sum(tokens) * sizes.work.token,
        attention=passes.attention * pairs,
        bytes=passes.linear * sizes.text_bytes,
    )


def _decode(case: Case, sizes: Sizes) -> Part:
    """The operations and bytes of all decode steps."""
    # the first token comes from prefill; a prompt's keys are read once for all of its completions
    steps, half = case.completion_tokens - 1, case.completion_tokens / 2
    prompt_tokens = sum(prompt.num_tokens for prompt in sizes.prompts)
    cached_tokens = prompt_tokens + case.prompts * case.samples * half
    return Part(
        phase="rollout",
        name="decode",
        passes=1,
        linear=_rows(case) * (steps * sizes.work.token + case.completion_tokens * sizes.work.action),
        attention=_completion_pairs(case, sizes),
        bytes=steps * (sizes.text_bytes + cached_tokens * sizes.kv_bytes),
        thin=True,
    )


def _completions(case: Case, sizes: Sizes, passes: Passes) -> Part:
    return Part(
        phase="update",
        name="completions",
        passes=passes.linear,
        linear=passes.linear * _rows(case) * (case.completion_tokens - 1) * sizes.work.token,
        attention=passes.attention * _completion_pairs(case, sizes),
        bytes=0,  # the weights are read in the same pass as for the prompts
    )


def _head(case: Case, sizes: Sizes, passes: Passes) -> Part:
    return Part(
        phase="update",
        name="head",
        passes=passes.linear,
        linear=passes.linear * _rows(case) * case.completion_tokens * sizes.work.action,
        attention=0,
        bytes=0,  # tied to the embedding: counted with the language model
    )


def _rows(case: Case) -> int:
    return case.prompts * case.samples


def _completion_pairs(case: Case, sizes: Sizes) -> float:
    each = (sizes.work.completion(case.completion_tokens, prompt.num_tokens, ATTENTION) for prompt in sizes.prompts)
    return case.samples * sum(each)


def floor_seconds(part: Part, rates: MachineRates) -> float:
    """The lower bound in seconds: the longer of arithmetic and memory traffic."""
    gemm = rates.thin_gemm if part.thin else rates.large.gemm
    memory = rates.weight_read if part.thin else rates.large.copy
    return max(part.linear / gemm + part.attention / rates.large.attention, part.bytes / memory)


def thin_gemm_rate(rows: int, weight_bytes: int) -> float:
    """Rate of passing `rows` tokens through one weight after another, with caches as cold as in a decode step."""
    count = max(1, weight_bytes // (WEIGHT_SIDE**2 * torch.float32.itemsize))
    weights = [torch.randn(WEIGHT_SIDE, WEIGHT_SIDE) for _ in range(count)]
    x = torch.randn(rows, WEIGHT_SIDE)

    def pass_all() -> None:
        for weight in weights:
            torch.nn.functional.linear(x, weight)

    return 2 * rows * WEIGHT_SIDE**2 * count / best_seconds(pass_all, "cpu")


def _measured(ours: Ours, steps: int) -> dict[str, float]:
    """Measure the median seconds of each phase and of the whole step."""
    taken = [ours.step() for _ in range(WARM_STEPS + steps)][WARM_STEPS:]
    phases = {name: median(times.phases[name] for times in taken) for name in taken[0].phases}
    return phases | {"step": median(times.step for times in taken)}


def _operator_table(ours: Ours) -> Table:
    """The operators that take most of a step's time, without the operators that they call."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        ours.step()
    operators = sorted(profiler.key_averages(), key=lambda each: -each.self_cpu_time_total)
    whole = sum(each.self_cpu_time_total for each in operators)
    times = ((each, each.self_cpu_time_total) for each in operators[:SHOWN_OPERATORS])
    rows = ((each.key, f"{each.count:,}", f"{time / 1e6:.3f}", f"{time / whole:.1%}") for each, time in times)
    return as_table("Operators of a step", ("what", "calls", "seconds", "share"), rows)


def _rate_table(rates: MachineRates) -> Table:
    beyond = thin_gemm_rate(THIN_ROWS, BEYOND_CACHE_BYTES)
    values = (
        ("large matrix products", rates.large.gemm, "GFLOP/s"),
        ("thin products over this model's weights", rates.thin_gemm, "GFLOP/s"),
        (f"thin products of {THIN_ROWS} rows over 1 GiB of weights", beyond, "GFLOP/s"),
        ("fused attention", rates.large.attention, "GFLOP/s"),
        ("reading as many bytes as this model's weights", rates.weight_read, "GB/s"),
        ("reading 1 GiB", rates.large.read, "GB/s"),
        ("copying 1 GiB, both ways counted", rates.large.copy, "GB/s"),
    )
    rows = ((name, f"{value / GIGA:.1f} {unit}") for name, value, unit in values)
    return as_table("This machine, one thread, float32", ("what", "rate"), rows)


def _part_table(parts: Sequence[Part], rates: MachineRates) -> Table:
    rows = (
        (
            part.phase,
            part.name,
            f"{part.passes:g}",
            f"{(part.linear + part.attention) / GIGA:,.1f}",
            f"{part.attention / GIGA:,.1f}",
            f"{part.bytes / GIGA:,.2f}",
            f"{floor_seconds(part, rates):.3f}",
        )
        for part in parts
    )
    headers = ("phase", "part", "passes", "GFLOP", "of it attention", "GB", "floor s")
    return as_table("Work of a step", headers, rows, num_left=2)


def phase_table(parts: Sequence[Part], rates: MachineRates, measured: dict[str, float]) -> Table:
    """Table of the measured phases and the sums of their floors."""
    floors = {name: sum(floor_seconds(part, rates) for part in parts if part.phase == name) for name in measured}
    floors["step"] = sum(floors.values())
    rows = []
    for name, seconds in measured.items():
        floor, share = (f"{floors[name]:.3f}", f"{floors[name] / seconds:.0%}") if floors[name] else ("", "")
        rows.append((name, floor, f"{seconds:.3f}", share))
    return as_table("Measured phases and their floors", ("phase", "floor s", "measured s", "floor / measured"), rows)


if __name__ == "__main__":
    main()
