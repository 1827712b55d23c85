"""The services and records of one run, which `fovea.wiring` makes and the loop passes to each stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from fovea.config.run import Config
from fovea.data.bad_rows import BadRows
from fovea.data.curriculum import CurriculumProgress
from fovea.data.order import RowOrder
from fovea.data.prompt_source import PromptSource
from fovea.evaluation.evaluator import Evaluator
from fovea.metrics.findings import FindingsWatch
from fovea.metrics.log import MetricsLog, Phases
from fovea.metrics.progress import Progress
from fovea.rollout.base import Engine
from fovea.rollout.collect import Interaction
from fovea.run.callbacks import Callbacks
from fovea.run.checkpoint import Checkpoints, SavedCheckpoint
from fovea.run.fingerprint import Fingerprint
from fovea.run.parity_faults import TakenSync
from fovea.run.warmup import WarmupStage
from fovea.train.base import Policy
from fovea.types import PromptImage
from fovea.weights.base import WeightSync
from fovea_gym.environments.base import Environment
from fovea_gym.graders.grading import Grading
from fovea_gym.rows.images import OpenImage
from fovea_gym.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Prompt sources of the three splits."""

    train: PromptSource
    dev: PromptSource
    test: PromptSource
    bad_rows: BadRows = field(default_factory=BadRows)

    @property
    def tasks(self) -> Mapping[str, Sequence[Task]]:
        """The rows by split."""
        return {"train": self.train.tasks, "dev": self.dev.tasks, "test": self.test.tasks}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStream:
    """Training prompts in the data order of the run, with their environment, graders and curriculum."""

    source: PromptSource
    order: RowOrder
    curriculum: CurriculumProgress
    environment: Environment
    grading: Grading
    max_episode_tokens: int | None = None

    @property
    def has_more(self) -> bool:
        """True if there are rows for another step; always true without `max_epochs`."""
        return self.source.has_more(self.order)

    @property
    def interaction(self) -> Interaction:
        """Environment, renderer, token limit, and the grader of the current curriculum stage."""
        return Interaction(
            environment=self.environment,
            grading=self.grading.at(self.curriculum.stage),
            renderer=self.source.renderer,
            max_tokens=self.max_episode_tokens,
        )


@dataclass(slots=True)
class RolloutMismatch:
    """The mean log-prob difference of a rollout from the trainer beyond which the run looks for a known fault."""

    _explained: float = 0.0
    """Largest difference, per version of the weights, for which no fault was found."""

    def allowed(self, limit: float, *, staleness: int) -> float:
        """The larger of the limit and twice the largest difference without a fault, per version of the weights."""
        return max(limit, 2 * self._explained) * (1 + staleness)

    def explained(self, mismatch: float, *, staleness: int) -> None:
        """Remember a difference for which no fault was found."""
        self._explained = max(self._explained, mismatch / (1 + staleness))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, ready for `fovea.loop.train`."""

    config: Config
    folder: Path
    environment: Environment
    sources: Sources
    stream: TaskStream
    engine: Engine
    policy: Policy
    weight_sync: WeightSync
    warmup: WarmupStage | None
    open_image: OpenImage
    evaluator: Evaluator
    checkpoints: Checkpoints
    resumed: SavedCheckpoint | None
    """The checkpoint to resume from; None for a new run."""
    metrics: MetricsLog
    phases: Phases
    progress: Progress
    started: float
    """`perf_counter` value at the start of `build`."""
    spent_seconds: float = 0.0
    """Seconds spent by earlier attempts, which `max_hours` counts together with the seconds of this process."""
    peak_tflops: float | None = None
    """Peak of the devices in TFLOP/s, the denominator of `mfu`; None if it is neither known nor set."""
    token_text: Callable[[int], str] = str
    image_token_id: int = -1
    """Id of the image tokens in a prompt; -1 for a model without images."""
    has_fast_path: bool = True
    """True if the model's family packs rows (`ModelFamily.fast_path`)."""
    box_frame: Callable[[PromptImage], tuple[int, int] | None] = lambda _image: None
    """Width and height of the frame in which the model gives coordinates (`ModelFamily.box_frame`), if it gives any."""
    findings_watch: FindingsWatch = field(default_factory=FindingsWatch)
    taken_sync: TakenSync = field(default_factory=TakenSync)
    rollout_mismatch: RolloutMismatch = field(default_factory=RolloutMismatch)
    callbacks: Callbacks = field(default_factory=Callbacks)
    profile: Callable[[int], AbstractContextManager[object]] = nullcontext
    """Makes the context manager around each step from its number (`fovea.metrics.profile`)."""
    fingerprint: Fingerprint = field(default_factory=dict)
    """Fingerprint of the run's inputs, which its checkpoints store."""
    held: ExitStack = field(default_factory=ExitStack)
    """Resources held until the run ends: the lock of its folder."""
