"""The user's Python functions that a run calls after each step and each evaluation, in the process of rank 0."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fovea.types import Evaluation, Metrics
from fovea_gym.environments.custom.loading import name_of
from fovea_gym.environments.custom.signatures import is_async
from fovea_gym.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A completed step, for `on_step`."""

    step: int
    """Counted from 1; a resumed run continues the count of its checkpoint."""
    max_steps: int
    metrics: Metrics
    """All metrics of the step by name (`python -m fovea.metrics.names`), as in metrics.jsonl."""
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """An evaluation of held-out rows, for `on_eval`."""

    step: int
    """Number of steps taken before the evaluation."""
    split: Literal["dev", "test"]
    when: str
    """`before`, `after-warmup` or `final` on test rows; `warmup` or a step such as `step-000010` on dev rows. The run
    folder has the answers in answers/SPLIT-WHEN.jsonl."""
    evaluation: Evaluation
    """The overall `accuracy`, and the accuracies, rewards and reward parts of all rows."""
    folder: Path


OnStep: TypeAlias = Callable[[StepRecord], object]
OnEval: TypeAlias = Callable[[EvalRecord], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """The callbacks of a run: their return values are ignored, and an exception ends the run."""

    on_step: OnStep | None = None
    on_eval: OnEval | None = None

    def check(self) -> None:
        """ConfigError for a callback that cannot be called with a record."""
        for argument, function in {"on_step": self.on_step, "on_eval": self.on_eval}.items():
            if function is not None:
                _check(argument, function)

    def stepped(self, record: StepRecord) -> None:
        """Call `on_step`."""
        _call("on_step", self.on_step, record, f"at step {record.step}")

    def evaluated(self, record: EvalRecord) -> None:
        """Call `on_eval`."""
        _call("on_eval", self.on_eval, record, f"of the evaluation {record.split}-{record.when}")


def _call(argument: str, function: Callable[[Any], object] | None, record: StepRecord | EvalRecord, when: str) -> None:
    if function is None:
        return
    callback = f"{argument}={name_of(function)} {when}"
    try:
        function(record)
    except SystemExit as error:
        if isinstance(error.code, int) and error.code > 128:  # 128 + number of a signal to the run during the call
            raise
        raise RuntimeError(
            f"the callback {callback} called sys.exit({error.code!r}), which does not end a run; raise an error to end "
            "it, or set max_steps"
        ) from error
    except BaseException as error:
        # Python prints the note below the traceback
        error.add_note(f"the callback {callback} raised this and ended the run; correct it, then set resume='auto'")
        raise


def _check(argument: str, function: object) -> None:
    if not callable(function) or isinstance(function, type):
        raise ConfigError(
            f"{argument}={function!r:.60} is not a function; write def {argument}(record) (docs/python.md)"
        )
    name = name_of(function)
    if is_async(function):
        raise ConfigError(f"{argument}={name} is async, but a run does not await it; write def {argument}(record)")
    try:
        inspect.signature(function).bind("record")
    except TypeError:
        raise ConfigError(
            f"{argument}={name} takes {inspect.signature(function)}, but is called with one record; write "
            f"def {argument}(record)"
        ) from None
    except ValueError:  # some C functions have no signature
        return
