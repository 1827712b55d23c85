"""Builders of the data pipeline: prompt sources and data order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from fovea.config.model import Model
from fovea.config.run import Config
from fovea.data.bad_rows import BadRows
from fovea.data.order import EpochOrder, Order, RowOrder
from fovea.data.prompt_source import PromptSource
from fovea.models.load import pick_device
from fovea.models.processor import Processor
from fovea.models.render import Renderer
from fovea.run.checkpoint import SavedCheckpoint
from fovea.run.context import Sources
from fovea_gym.environments.base import Environment, Split
from fovea_gym.environments.mixture import with_shares
from fovea_gym.rows.images import ImageOpener
from fovea_gym.rows.tasks import kinds_of, levels_of
from fovea_gym.types import Task

PROMPT_CACHE_GIB = 1.0
"""Memory for processed prompts and images of a split; the least recently used are evicted."""
CUDA_PREFETCH_THREADS = 4
"""Threads that render ahead: an image of 512 px takes about 10 ms, so 64 are ready in less than a second."""


def make_renderer(settings: Model, processor: Processor, opener: ImageOpener, *, max_new_tokens: int) -> Renderer:
    """Make the renderer of prompts, which leaves positions for a completion of `max_new_tokens`."""
    return Renderer(
        processor,
        opener,
        min_pixels=settings.min_pixels,
        max_pixels=settings.max_pixels,
        max_new_tokens=max_new_tokens,
    )


def make_sources(config: Config, environment: Environment, renderer: Renderer, bad_rows: BadRows) -> Sources:
    """Make the prompt sources of the three splits."""

    def source(split: Split, cache_gib: float = 0.0) -> PromptSource:
        return PromptSource(
            environment.tasks(split),
            environment,
            renderer,
            max_prompt_tokens=config.data.max_prompt_tokens,
            on_bad_row=config.data.on_bad_row,
            cache_gib=cache_gib,
            bad_rows=bad_rows,
        )

    train = source("train", PROMPT_CACHE_GIB)
    train.render_ahead(prefetch_threads(pick_device(config.model.device)))
    return Sources(
        train=train,
        dev=source("dev", PROMPT_CACHE_GIB),
        test=source("test"),
        bad_rows=bad_rows,
    )


def prefetch_threads(device: torch.device) -> int:
    """Number of threads that render prompts ahead of time for a model on this device."""
    # on a CPU, threads would take cores from training
    return CUDA_PREFETCH_THREADS if device.type == "cuda" else 0


def within_epochs(config: Config, tasks: Callable[[], Sequence[Task]], resumed: SavedCheckpoint | None) -> Config:
    """The settings with `max_steps` lowered to the number of steps in `max_epochs`, so that schedules end there."""
    if config.max_epochs is None:
        return config
    num_rows, per_step = config.max_epochs * len(tasks()), config.rollout.prompts_per_step
    num_steps = math.ceil(num_rows / per_step)
    if resumed is not None:
        # with a smaller max_epochs before, the last step before the checkpoint may have had too few rows
        left = num_rows - resumed.state["order"]["num_sampled"]
        num_steps = max(num_steps, resumed.step + math.ceil(left / per_step))
    return config.model_copy(update={"max_steps": min(num_steps, config.max_steps)})


def make_order(config: Config, tasks: Sequence[Task]) -> RowOrder:
    """Make the data order of training rows; ConfigError for a curriculum that the order cannot follow."""
    order: RowOrder
    if config.max_epochs is not None or not config.data.shuffle:
        shuffle, epochs = config.data.shuffle, config.max_epochs
        order = EpochOrder(len(tasks), seed=config.seed, shuffle=shuffle, max_epochs=epochs)
    else:
        weights = with_shares(config.data.kind_weights, tasks)
        order = Order(kinds_of(tasks), weights=weights, seed=config.seed, levels=levels_of(tasks))
    # check all tables before the run begins, not only when their stage is reached
    for table in config.curriculum.tables_in_use:
        order.weigh_levels(table)
    order.weigh_levels({})
    return order
