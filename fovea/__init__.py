"""Fovea: reinforcement learning for vision-language models.

The public names below are imported when one of them is first used, since importing torch takes seconds
(docs/python.md).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fovea_gym import __version__

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
    "__version__",
    "evaluate",
    "export",
    "load_run",
]

if TYPE_CHECKING:
    # for type checkers, which would otherwise accept any name because of `__getattr__`
    from fovea.api import (
        GRPO,
        PPO,
        EvalRecord,
        Exported,
        FoveaError,
        Score,
        StepRecord,
        TargetMetrics,
        Task,
        TrainedRun,
        evaluate,
        export,
        load_run,
    )
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            there_are = f"it has {', '.join(each for each in __all__ if each != '__version__')} (docs/python.md)"
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; {there_are}")
        return getattr(import_module("fovea.api"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
