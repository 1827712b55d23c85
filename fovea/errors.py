"""The failure policy, stated once.

* What a user can get wrong (a setting, a file, a row) ends in one line: what was seen, why it cannot work, the
  one thing to change. The command line prints that line; `--debug` adds the traceback.
* What was dropped on purpose (a bad row, a group without signal) is a counter in the metrics, never silent.
* What our own code guarantees is an `assert` with the values in its message.
* Everything else travels: nothing outside this module catches a broad exception.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class FoveaError(Exception):
    """An error whose text is meant for the user: what was seen, why it fails, the fix."""


class ConfigError(FoveaError, ValueError):
    """A setting that is unknown, out of range, or at odds with another one."""


class DataError(FoveaError, ValueError):
    """A file, a row or an image that cannot be read as asked."""


class BadRowError(DataError):
    """A row that cannot become a prompt; `data.on_bad_row` says what follows.

    `reason` is one word for its kind, such as `image_damaged`: what it is counted under. docs/data.md lists them.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class ModelError(FoveaError, ValueError):
    """A model folder that cannot be loaded, or a model that is not of a known family."""


class EngineError(FoveaError, RuntimeError):
    """A request that the rollout engine cannot serve."""


class TrainError(FoveaError, RuntimeError):
    """A training step that cannot be taken: a batch that does not fit, a number that is not finite."""


class ParityError(FoveaError, RuntimeError):
    """Engine and trainer do not agree on the log-probs of the same tokens."""


class ScoreError(FoveaError, RuntimeError):
    """A completion that could not be scored: a judge that is away, slow, or says nothing that is a score."""


class UnscoredError(ScoreError):
    """The same where the settings say to leave its group out and to count it."""


class MissingExtraError(FoveaError, ImportError):
    """An optional package that a setting needs and that is not installed."""


@contextmanager
def named(as_ours: Callable[[Exception], FoveaError]) -> Iterator[None]:
    """For calls of packages that raise anything: their errors as one of ours, ours as they are."""
    try:
        yield
    except FoveaError:
        raise
    except Exception as error:
        raise as_ours(error) from error


def result_or_error(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """For code of the user's, which may raise anything, `SystemExit` too: what it returns, or what it raised."""
    try:
        return call(), None
    except BaseException as error:
        return None, error


def first_line(error: BaseException) -> str:
    """`ValueError: what was wrong`, the first line of it."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def broken_checkpoint(error: Exception) -> str:
    """What is wrong with a checkpoint that cannot be read, and what to do."""
    reason = str(error).split(". ")[0].split("\n")[0]  # torch explains at length
    return f"this checkpoint cannot be read ({reason}); delete its folder to resume from the one before it"
