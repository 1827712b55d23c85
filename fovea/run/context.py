"""A run, ready to go: everything that the loop needs, behind protocols. Made by `fovea.build.run`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from fovea.config.run import Config
from fovea.data.bad_rows import BadRows
from fovea.data.images import OpenImage
from fovea.data.order import Order
from fovea.environments.base import Environment
from fovea.environments.curriculum import Curriculum
from fovea.environments.prompt_source import PromptSource
from fovea.evaluation.evaluator import Evaluator
from fovea.metrics.log import MetricsLog, Phases
from fovea.metrics.progress import Progress
from fovea.rollout.base import Engine
from fovea.run.checkpoint import Checkpoint, Checkpoints
from fovea.run.warmup import Warmup
from fovea.train.base import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Prompts of every split."""

    train: PromptSource
    dev: PromptSource
    test: PromptSource
    bad_rows: BadRows = field(default_factory=BadRows)
    """Those of all three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What `fovea.loop.train` works with."""

    config: Config
    folder: Path
    environment: Environment
    sources: Sources
    order: Order
    curriculum: Curriculum
    engine: Engine
    policy: Policy
    warmup: Warmup | None
    open_image: OpenImage
    evaluator: Evaluator
    checkpoints: Checkpoints
    resumed: Checkpoint | None
    """Where the run goes on; None: at the start."""
    metrics: MetricsLog
    phases: Phases
    progress: Progress
    started: float
    """`perf_counter` at the start of `build`."""
    peak_tflops: float | None = None
    """Of the device, for `mfu`; None: not known, and not set."""
    token_text: Callable[[int], str] = str
    """How a message shows a token."""
    profile: Callable[[int], AbstractContextManager[object]] = nullcontext
    """Entered around every step (`fovea.metrics.profile`)."""
