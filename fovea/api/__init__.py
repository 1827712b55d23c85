"""The names that `fovea` makes public (docs/python.md)."""

from fovea.api.runs import TrainedRun, load_run
from fovea.api.targets import evaluate, export
from fovea.api.trainers import GRPO, PPO
from fovea.errors import FoveaError
from fovea.evaluation.comparison import TargetMetrics
from fovea.exporting.export import Exported
from fovea.types import Score, Task

__all__ = [
    "GRPO",
    "PPO",
    "Exported",
    "FoveaError",
    "Score",
    "TargetMetrics",
    "Task",
    "TrainedRun",
    "evaluate",
    "export",
    "load_run",
]
