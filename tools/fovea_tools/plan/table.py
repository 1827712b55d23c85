"""A plan as text and a table for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fovea_tools.plan.engine import CACHE
from fovea_tools.plan.machine import GIB, HEADROOM_FRAC
from fovea_tools.plan.memory import LEFT_BY_UPDATE
from fovea_tools.plan.plan import Advice, RunPlan

SHOWN_FRAC = 0.01
"""Share of the peak above which a part has its own row."""


def plan_tables(plan: RunPlan, advice: Sequence[Advice]) -> Group:
    """Text and tables of memory by part and phase, of the seconds of a step, and of whether the plan fits."""
    return Group(*_parts(plan, advice))


def _parts(plan: RunPlan, advice: Sequence[Advice]) -> Iterator[RenderableType]:
    lengths = plan.lengths
    images = "image" if lengths.images == 1 else "images"
    yield Text(
        f"{plan.model} on {plan.machine.gpus} x {plan.machine.gpu.name}: {'at most ' * plan.is_tiny}"
        f"{_millions(plan.parameters)} parameters, {_millions(plan.trainable)} of them trained"
    )
    yield Text(
        f"assumed: prompts of {lengths.prompt_tokens:,} tokens with {lengths.images} {images} of "
        f"{lengths.image_tokens:,}, completions of {lengths.completion_tokens:,}"
    )
    yield _memory(plan)
    if plan.on_host:
        parts = ", ".join(f"{part} {_gib(size)}" for part, size in plan.on_host.items())
        yield Text(f"in the host's memory for each {_device(plan)}, GiB: {parts}")
    cache_tokens = plan.batch_tokens if plan.room is None else plan.room.cache_tokens
    if cache_tokens is not None:
        yield Text(
            f"the key-value cache of an engine has room for {cache_tokens:,} tokens ({plan.rows:,} completions at once "
            f"on average); sized to {plan.cache_sized_to}"
        )
    yield Text(_seconds(plan))
    yield from _verdict(plan, advice)


def _device(plan: RunPlan) -> str:
    """The word for the device that holds a process: GPU, or process on a CPU."""
    return "GPU" if plan.machine.gpu.is_cuda else "process"


def _memory(plan: RunPlan) -> Table:
    table = Table()
    table.add_column(f"GiB of each {_device(plan)} at the peak")
    for phase in plan.phases:
        table.add_column(phase.phase, justify="right")
    largest = Counter[str]()
    for phase in plan.phases:
        largest |= Counter(phase.parts)
    shown = [part for part, size in largest.most_common() if size >= SHOWN_FRAC * plan.peak.total]
    for part in shown:
        table.add_row(part, *(_gib(phase.parts.get(part, 0)) for phase in plan.phases))
    if len(shown) < len(largest):
        others = (phase.total - sum(phase.parts.get(part, 0) for part in shown) for phase in plan.phases)
        table.add_row("others", *map(_gib, others))
    table.add_section()
    table.add_row("all", *(_gib(phase.total) for phase in plan.phases), style="bold")
    free = f"usable: {plan.machine.gpu.memory_gib:.3g} less {HEADROOM_FRAC:.0%}"
    table.add_row(free, *([_gib(plan.machine.usable_bytes)] * len(plan.phases)))
    return table


def _seconds(plan: RunPlan) -> str:
    """Estimated seconds of a step by phase, with their source where it is not a data sheet."""
    gpu = plan.machine.gpu
    if gpu.peak_tflops is None or gpu.memory_gb_per_second is None:
        return f"no seconds: the speed of {gpu.name} is unknown; set plan.gpu to a similar GPU, such as plan.gpu=l40s"
    known = {each.phase: each.seconds for each in plan.compute if each.seconds is not None}
    by_phase = " + ".join(f"{phase} {_number(seconds)}" for phase, seconds in known.items())
    text = f"seconds of a step, estimated: {by_phase} = {_number(sum(known.values()))}"
    if len(known) < len(plan.compute):
        text += "; without the rollout, which runs on external servers"
    if not gpu.is_cuda:
        return (
            f"{text}; rough, from a matrix product ({1000 * gpu.peak_tflops:,.0f} GFLOP/s per process) and a memory "
            f"read ({gpu.memory_gb_per_second:,.0f} GB/s) measured now on this CPU"
        )
    if not plan.received_bytes:
        return text
    if plan.link_seconds is None:
        return f"{text}; each GPU receives {plan.received_bytes / GIB:,.3g} GiB, partly over your network"
    return f"{text}; up to {_number(plan.link_seconds)} more for traffic between GPUs at the link's rate"


def _number(seconds: float) -> str:
    return f"{seconds:,.1f}" if seconds >= 1 else f"{seconds:.2g}"


def _verdict(plan: RunPlan, advice: Sequence[Advice]) -> Iterator[Text]:
    usable, total = plan.machine.usable_bytes, plan.peak.total
    if plan.fits:
        free = usable - total
        taken = ""
        if plan.cache_sized_to == LEFT_BY_UPDATE:
            free, taken = free + plan.peak.parts.get(CACHE, 0), ", and the key-value cache takes them"
        yield Text(f"fits: {_gib(free)} GiB are free at the peak, in the {plan.peak.phase}{taken}", style="green")
        return
    if total > usable:
        yield Text(f"does not fit: {_gib(total - usable)} GiB too much in the {plan.peak.phase}", style="red")
    if plan.room is not None and plan.room.missing_bytes:
        yield Text(
            f"does not fit: the key-value cache has room for {plan.room.cache_tokens:,} tokens next to the "
            f"engine's weights, but one conversation may have {plan.room.longest_tokens:,}",
            style="red",
        )
    if not advice:
        yield Text("no known setting makes it fit; use larger GPUs (plan.gpu) or a smaller model")
    for each in advice:
        yield Text(f"  it fits with {' '.join(each.settings)} ({each.gib:.1f} GiB)")


def _gib(num_bytes: float) -> str:
    gib = num_bytes / GIB
    return f"{gib:,.2f}" if gib >= 0.1 or not gib else f"{gib:.3f}"


def _millions(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"
