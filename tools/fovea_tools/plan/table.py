"""A plan as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fovea_tools.plan.engine import CACHE
from fovea_tools.plan.machine import HEADROOM_FRAC
from fovea_tools.plan.memory import LEFT_BY_UPDATE
from fovea_tools.plan.plan import Advice, RunPlan

GIB, GB, TERA = 2**30, 1e9, 1e12


def plan_tables(plan: RunPlan, advice: Sequence[Advice]) -> Group:
    """Memory by part and phase, traffic and work of a step, and whether it fits."""
    return Group(*_parts(plan, advice))


def _parts(plan: RunPlan, advice: Sequence[Advice]) -> Iterator[RenderableType]:
    lengths, machine = plan.lengths, plan.machine
    count = f"{machine.gpus} x {machine.gpu.name}"
    images = "image" if lengths.images == 1 else "images"
    yield Text(f"{plan.model} on {count}")
    at_most = "" if plan.vocabulary_limit is None else "at most "
    yield Text(f"{at_most}{_millions(plan.parameters)} parameters, {_millions(plan.trainable)} of them trained")
    if plan.vocabulary_limit is not None:
        yield Text(
            f"the vocabulary, made from the training rows, may have fewer than {plan.vocabulary_limit:,} entries"
        )
    yield Text(
        f"assumed: prompts of {lengths.prompt_tokens:,} tokens with {lengths.images} {images} of "
        f"{lengths.image_tokens:,}, completions of {lengths.completion_tokens:,}"
    )
    yield Text(f"micro-batches of each {_device(plan)} in a step: {plan.microbatches}")
    yield _memory(plan)
    if plan.on_host:
        parts = ", ".join(f"{part} {_gib(size)}" for part, size in plan.on_host.items())
        yield Text(f"in the host's memory for each {_device(plan)}, GiB: {parts}")
    cache_tokens = plan.batch_tokens if plan.room is None else plan.room.cache_tokens
    if cache_tokens is not None:
        yield Text(
            f"the key-value cache of an engine has room for {cache_tokens:,} tokens; sized to {plan.cache_sized_to}"
        )
    if plan.rows is not None:
        yield Text(f"completions that an engine decodes at once, on average: {plan.rows:,}")
    yield _work(plan)
    if (note := _note_on_seconds(plan)) is not None:
        yield Text(note)
    if plan.traffic:
        yield _traffic(plan)
    yield from _verdict(plan, advice)


def _device(plan: RunPlan) -> str:
    """The name of what holds a process: its GPU, or the process itself on a CPU."""
    return "GPU" if plan.machine.gpu.is_cuda else "process"


def _empty_table(title: str, first: str, *numbers: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _memory(plan: RunPlan) -> Table:
    title = f"memory of each {_device(plan)} at the peak of a phase, GiB"
    table = _empty_table(title, "part", *(phase.phase for phase in plan.phases))
    parts = dict.fromkeys(part for phase in plan.phases for part in phase.parts)
    for part in sorted(parts, key=lambda part: -max(phase.parts.get(part, 0) for phase in plan.phases)):
        table.add_row(part, *(_gib(phase.parts.get(part, 0)) for phase in plan.phases))
    table.add_section()
    table.add_row("all", *(_gib(phase.total) for phase in plan.phases), style="bold")
    usable = _gib(plan.machine.usable_bytes)
    free = f"usable: {plan.machine.gpu.memory_gib:.3g} less {HEADROOM_FRAC:.0%}"
    table.add_row(free, *([usable] * len(plan.phases)))
    return table


def _work(plan: RunPlan) -> Table:
    where = "all GPUs" if plan.machine.gpu.is_cuda else "the CPU"
    table = _empty_table(f"work of a step on {where}", "phase", "TFLOP", "seconds, estimated")
    for each in plan.compute:
        table.add_row(each.phase, f"{each.flops / TERA:,.4g}", _seconds(each.seconds))
    return table


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:,.1f}" if seconds >= 1 else f"{seconds:.2g}"


def _note_on_seconds(plan: RunPlan) -> str | None:
    """Note on the source of the estimated seconds where that is not a data sheet, or on why there are none."""
    gpu = plan.machine.gpu
    if gpu.peak_tflops is None or gpu.memory_gb_per_second is None:
        return f"no seconds: the rates of {gpu.name} are not known here; name a GPU like it, such as plan.gpu=l40s"
    if any(each.seconds is None for each in plan.compute):
        return "no seconds for the rollout: servers elsewhere draw"
    if gpu.is_cuda:
        return None
    return (
        f"seconds are rough: by a product of matrices ({1000 * gpu.peak_tflops:,.0f} GFLOP/s a process) and a read of "
        f"memory ({gpu.memory_gb_per_second:,.0f} GB/s) measured now on this CPU, without what small models wait for "
        "besides"
    )


def _traffic(plan: RunPlan) -> Table:
    table = _empty_table("bytes moved in a step", "what", "GB", "seconds at the link's rate")
    link = plan.machine.link_gb_per_second
    for moved in plan.traffic:
        gigabytes = moved.num_bytes / GB
        known = link is not None and not moved.by_driver
        table.add_row(moved.what, f"{gigabytes:,.3g}", f"{gigabytes / link:,.2g}" if known and link else "-")
    return table


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
            f"does not fit: the key-value cache has room for {plan.room.cache_tokens:,} tokens beside the engine's "
            f"weights, and one conversation may have {plan.room.longest_tokens:,}",
            style="red",
        )
    if not advice:
        yield Text("no setting that is known here makes it fit; take larger GPUs (plan.gpu) or a smaller model")
    for each in advice:
        yield Text(f"  it fits with {' '.join(each.settings)} ({each.gib:.1f} GiB)")


def _gib(num_bytes: float) -> str:
    gib = num_bytes / GIB
    return f"{gib:,.2f}" if gib >= 0.1 or not gib else f"{gib:.3f}"


def _millions(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"
