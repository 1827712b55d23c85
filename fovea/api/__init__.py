"""The names that `fovea` makes public (docs/python.md)."""

from fovea.api.targets import TrainedRun, evaluate, export, load_run
from fovea.api.trainers import GRPO, PPO
from fovea.commands.exporting.export import Exported
from fovea.evaluation.comparison import TargetMetrics
from fovea.run.callbacks import EvalRecord, StepRecord
from fovea_gym.errors import FoveaError
from fovea_gym.types import Score, Task

__all__ = [
    "GRPO",
    "PPO",
    "EvalRecord",
    "Exported",
    "FoveaError",
    "Score",
    "StepRecord",
    "TargetMetrics",
    "Task",
    "TrainedRun",
    "evaluate",
    "export",
    "load_run",
]
