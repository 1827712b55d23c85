"""Builders of a run's outputs: profile, and the table of parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text

from fovea.config.run import Config, Log
from fovea.metrics.profile import StepProfile
from fovea.metrics.progress import Progress
from fovea.metrics.throughput import known_peak_tflops
from fovea.train.base import ModelFacts


def make_profile(config: Config, folder: Path, start_step: int, progress: Progress) -> StepProfile | None:
    """Make the profile of the next steps; None unless the settings ask for one and steps are left."""
    if not config.profile or start_step >= config.max_steps:
        return None
    return StepProfile(folder, start_step=start_step, max_steps=config.max_steps, say=progress.print)


def peak_tflops(settings: Log, facts: ModelFacts, progress: Progress) -> float | None:
    """Peak TFLOP/s of all training processes together, the denominator of `mfu`; None where nothing gives it.

    The peak of one is a setting, or the GPU's by its data sheet.
    """
    each = settings.peak_tflops
    if each is None and facts.device_name is not None:
        each = known_peak_tflops(facts.device_name)
        progress.print(
            f"mfu: not reported, the peak of {facts.device_name} is not known; set log.peak_tflops (dense bfloat16)"
            if each is None
            else f"mfu: a share of {each:g} TFLOP/s, dense bfloat16 by the data sheet of {facts.device_name}"
        )
    return None if each is None else each * facts.num_workers


def model_table(name: str, facts: ModelFacts) -> Table:
    """Table of trainable and total parameters of each part of the model."""
    threads = torch.get_num_threads()
    # a name is text, not markup
    title = Text(f"{name} on {facts.device}, {threads} thread{'' if threads == 1 else 's'}")
    table = Table(title=title, title_justify="left")
    for header in ("part", "trainable", "total"):
        table.add_column(header, justify="left" if header == "part" else "right")
    for row in facts.parameters:
        table.add_row(row.part, f"{row.trainable:,}", f"{row.total:,}")
    return table
