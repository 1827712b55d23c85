"""Exceptions of rows, environments, graders and tools, and the text that describes an exception of user code."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any, ClassVar

from pydantic import ValidationError


class FoveaError(Exception):
    """Base class of errors whose text is meant for the user: what was set, why it fails, the fix."""

    exit_code: ClassVar[int] = 2
    """Exit code of a command that ends with this error; docs/faults.md says after which a supervised run restarts."""


class SeveralErrors(FoveaError):
    """Errors of independent checks, reported together, each on a separate line."""

    def __init__(self, errors: Sequence[FoveaError]) -> None:
        super().__init__("\n".join(map(str, errors)))
        self.errors = tuple(errors)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors,)


class ConfigError(FoveaError, ValueError):
    """A setting that is unknown, out of range, or in conflict with another one."""


class DataError(FoveaError, ValueError):
    """A file, a row or an image that cannot be read."""


class BadRowError(DataError):
    """A row that cannot be turned into a prompt, which a run may skip.

    `problem` is the message without the `fix`, which is addressed to the author of the row. `reason` is the key under
    which bad rows are counted, such as `image_damaged`; docs/data.md lists them.
    """

    def __init__(self, problem: str, reason: str, fix: str = "") -> None:
        super().__init__(f"{problem}; {fix}" if fix else problem)
        self.problem = problem
        self.reason = reason
        self.fix = fix

    def __reduce__(self) -> tuple[Any, ...]:
        # a worker process sends the error to its caller: by default only the message would be pickled
        return type(self), (self.problem, self.reason, self.fix)


OTHER = "other"
"""The reason under which row errors without a reason are counted."""


class ClusterError(FoveaError, RuntimeError):
    """A worker process that has ended, failed, hangs, or cannot be reached."""

    exit_code = 3


class OutOfMemoryError(FoveaError, MemoryError):
    """An allocation that failed, on the host or on a device."""

    exit_code = 4


class ScoreError(FoveaError, RuntimeError):
    """A completion could not be scored: the judge is unreachable, timed out, or returned no valid score."""


class UnscoredError(ScoreError):
    """A ScoreError that the settings tolerate: the completion's group is left out and counted."""


class SessionError(FoveaError, RuntimeError):
    """A session of an environment failed, and the settings say that the run stops in that case."""


class FailedEpisodeError(UnscoredError):
    """A session or a score failed, and the settings tolerate it: the episode is left out or gets a fixed reward.

    `reason` is the name under which the failure is counted: `open`, `reply`, `picture`, `score` or `deadline`.
    """

    def __init__(self, message: str, reason: str, reward: float | None = None) -> None:
        """`reward` is the reward of the episode; None leaves the episode out."""
        super().__init__(message)
        self.reason = reason
        self.reward = reward

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.reason, self.reward)


class MissingExtraError(FoveaError, ImportError):
    """An optional package that a setting requires is not installed."""


@contextmanager
def named(as_ours: Callable[[Exception], FoveaError]) -> Iterator[None]:
    """Convert every exception that is not a FoveaError with `as_ours`; a context for calls into other packages."""
    try:
        yield
    except FoveaError:
        raise
    except Exception as error:
        raise as_ours(error) from error


def result_or_error(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """The result of `call`, or the exception that it raised, of any type; for user code."""
    # BaseException: user code may call sys.exit, which must not end the run without a message
    try:
        return call(), None
    except BaseException as error:
        return None, error


def first_line(error: BaseException) -> str:
    """Type and first line of an exception, such as `ValueError: bad length`; if it is empty, the failed statement."""
    return _with_text(error) or f"{type(error).__name__}{_statement(error)}"


def _with_text(error: BaseException) -> str | None:
    # the first line of pydantic's message only counts the errors: list them instead
    faults = [_fault(each) for each in error.errors()] if isinstance(error, ValidationError) else []
    lines = faults or str(error).strip().splitlines()[:1]
    return f"{type(error).__name__}: {'; '.join(each[:200] for each in lines)}" if lines else None


def _fault(found: Mapping[str, Any]) -> str:
    """Text of one validation error of pydantic: the field and what is wrong with it."""
    field = ".".join(map(str, found["loc"]))
    return f"{field}: {found['msg']}" if field else found["msg"].removeprefix("Value error, ")


def _statement(error: BaseException) -> str:
    """The innermost line of the traceback, of any package; a failed `assert` has no other description."""
    frames = extract_tb(error.__traceback__)
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}, `{frames[-1].line}`" if frames else ""


def describe_error(error: BaseException) -> str:
    """Describe an exception of user code, such as `raised ValueError: bad length at mine.py:12`."""
    return f"raised {_with_text(error) or type(error).__name__}{_place(error)}"


def _place(error: BaseException) -> str:
    """The innermost line of user code: a file that belongs neither to this package nor to an installed one."""
    theirs = [Path(__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))]
    for frame in reversed(extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_file() and not any(file.is_relative_to(folder) for folder in theirs):
            shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
            return f" at {shown}:{frame.lineno}"
    return ""
