"""Exception types and the failure policy.

* User errors (a setting, a file, a row) are a FoveaError of one line: what was set, why it fails, the fix. The command
  line prints that line; `--debug` adds the traceback.
* Whatever is dropped on purpose (a bad row, a group without signal) is counted in the metrics, never silent.
* Invariants of our own code are `assert` statements with the values in their messages.
* All other exceptions propagate. What catches `Exception` cleans up and raises it again, or hands it to whoever waits
  for the result: a future, the other ranks, the caller whose turn comes later.
"""

import re
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
    """Exit code of a command that ends with it. docs/faults.md lists them; a supervised run goes on after some."""


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
    """A row that cannot be turned into a prompt; `data.on_bad_row` decides between stopping and skipping it.

    `reason` is the key that it is counted under, such as `image_damaged`; docs/data.md lists them.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        # a worker process sends it to its caller: an exception is otherwise made again of its message only
        return type(self), (str(self), self.reason)


class ModelError(FoveaError, ValueError):
    """A model folder that cannot be loaded, or a model of an unsupported family."""


class EngineError(FoveaError, RuntimeError):
    """A request that the rollout engine cannot serve."""


class TrainError(FoveaError, RuntimeError):
    """A training step that cannot be completed: a batch that does not fit, non-finite losses or gradients."""


class ClusterError(FoveaError, RuntimeError):
    """A worker process that has ended, failed, hangs, or cannot be reached."""

    exit_code = 3


class LostWorkerError(ClusterError):
    """A worker process that has ended, or was killed since it hung; a request to its engine may go to another one."""


class LostEngineError(ClusterError):
    """A rollout engine whose own processes have ended or hang; its requests may go to another one."""


class LostRankError(ClusterError):
    """A collective call that another rank has left, or has not come to; that one may know why."""


class OutOfMemoryError(FoveaError, MemoryError):
    """An allocation that failed, on the host or on a device."""

    exit_code = 4


class MicrobatchMemoryError(OutOfMemoryError):
    """An allocation that failed in a micro-batch of one of several ranks, where smaller ones may fit.

    `next_max_tokens` is the limit to begin again with.
    """

    exit_code = 5

    def __init__(self, message: str, next_max_tokens: int) -> None:
        super().__init__(message)
        self.next_max_tokens = next_max_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.next_max_tokens)


class ParityError(FoveaError, RuntimeError):
    """Log-probs of engine and trainer for the same tokens that differ by more than the limit."""


class ScoreError(FoveaError, RuntimeError):
    """A completion that could not be scored: a judge that is unreachable, times out, or returns no valid score."""


class UnscoredError(ScoreError):
    """A ScoreError that the settings tolerate: the completion's group is left out and counted."""


class SessionError(FoveaError, RuntimeError):
    """A session of an environment that failed, where the settings say that the run stops then."""


class FailedEpisodeError(UnscoredError):
    """A session or a score that failed, which the settings tolerate: its episode is left out, or has a fixed reward.

    `reason` is the name that it is counted under: `open`, `reply`, `picture`, `score` or `deadline`.
    """

    def __init__(self, message: str, reason: str, reward: float | None = None) -> None:
        """`reward` is that of the episode; None leaves it out."""
        super().__init__(message)
        self.reason = reason
        self.reward = reward

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.reason, self.reward)


class TrackerError(FoveaError, RuntimeError):
    """An experiment tracker that cannot be reached, or refuses what it is sent."""


class MissingExtraError(FoveaError, ImportError):
    """An optional package that a setting requires is not installed."""


_OUT_OF_MEMORY = re.compile(
    "can't allocate memory|out of memory|bad_alloc|ALLOC_FAILED|could not create a (primitive|memory object)(?! desc)"
)
"""Messages of RuntimeErrors: torch's CPU allocator, CUDA, the C++ library, cuBLAS, and oneDNN, which names no cause."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error says that an allocation failed, on the host or on a device."""
    # torch.OutOfMemoryError is a RuntimeError, too
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    )


@contextmanager
def memory_for(what: str, fix: str) -> Iterator[None]:
    """A block that is named in the OutOfMemoryError of an allocation that fails in it, with the settings to change."""
    try:
        yield
    except FoveaError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"memory ran out in {what}; {fix}") from error


@contextmanager
def named(as_ours: Callable[[Exception], FoveaError]) -> Iterator[None]:
    """Context in which every exception but a FoveaError is converted by `as_ours`, for calls into other packages."""
    try:
        yield
    except FoveaError:
        raise
    except Exception as error:
        raise as_ours(error) from error


def result_or_error(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """The result of `call` or the exception that it raised, whatever its type; for user code."""
    # BaseException: user code may call sys.exit, which must not end the run without a message
    try:
        return call(), None
    except BaseException as error:
        return None, error


def first_line(error: BaseException) -> str:
    """Type and first line of an exception, such as `ValueError: bad length`; without text the statement that failed."""
    return _with_text(error) or f"{type(error).__name__}{_statement(error)}"


def _with_text(error: BaseException) -> str | None:
    # pydantic's own first line counts the faults, and names none
    faults = [_fault(each) for each in error.errors()] if isinstance(error, ValidationError) else []
    lines = faults or str(error).strip().splitlines()[:1]
    return f"{type(error).__name__}: {'; '.join(each[:200] for each in lines)}" if lines else None


def _fault(found: Mapping[str, Any]) -> str:
    """A fault that pydantic has found: the field and what is wrong with it."""
    field = ".".join(map(str, found["loc"]))
    return f"{field}: {found['msg']}" if field else found["msg"].removeprefix("Value error, ")


def _statement(error: BaseException) -> str:
    """The innermost line, of any package: all that a failed `assert` tells of its cause."""
    frames = extract_tb(error.__traceback__)
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}, `{frames[-1].line}`" if frames else ""


def describe_error(error: BaseException) -> str:
    """Describe an exception of the user's code, such as `raised ValueError: bad length at mine.py:12`."""
    return f"raised {_with_text(error) or type(error).__name__}{_place(error)}"


def _place(error: BaseException) -> str:
    """The innermost line of the user's, which is neither of this package nor of an installed one."""
    theirs = [Path(__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))]
    for frame in reversed(extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_file() and not any(file.is_relative_to(folder) for folder in theirs):
            shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
            return f" at {shown}:{frame.lineno}"
    return ""


def broken_checkpoint(error: Exception) -> str:
    """Error text for a checkpoint that cannot be read: the cause in one line, and the fix."""
    reason = str(error).split(". ")[0].split("\n")[0]  # torch's messages go on for paragraphs
    return f"this checkpoint cannot be read ({reason}); delete its folder to resume from the one before it"
