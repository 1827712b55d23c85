"""Exception types and the failure policy.

* User errors (a setting, a file, a row) are a FoveaError of one line: what was set, why it fails, the fix. The command
  line prints that line; `--debug` adds the traceback.
* Everything that is dropped on purpose (a bad row, a group without signal) is counted in the metrics.
* Invariants of our own code are `assert` statements with the values in their messages.
* All other exceptions propagate. Code that catches `Exception` cleans up and re-raises it, or passes it on to those who
  wait for the result: a future, the other ranks, a later caller.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fovea_gym.errors import ClusterError, FoveaError, OutOfMemoryError


class ModelError(FoveaError, ValueError):
    """A model folder that cannot be loaded, or a model of an unsupported family."""


class EngineError(FoveaError, RuntimeError):
    """A request that the rollout engine cannot serve."""


class TrainError(FoveaError, RuntimeError):
    """A training step that cannot be completed: the batch does not fit, or losses or gradients are not finite."""


class LostWorkerError(ClusterError):
    """A worker process has ended, or was killed because it hung; requests to its engine may go to another engine."""


class LostEngineError(ClusterError):
    """The processes of a rollout engine have ended or hang; its requests may go to another engine."""


class LostRankError(ClusterError):
    """Another rank has left a collective call or has not reached it; the error of that rank may say why."""


class MicrobatchMemoryError(OutOfMemoryError):
    """An allocation failed in a micro-batch of one of several ranks; `next_max_tokens` is the limit to restart with."""

    exit_code = 5

    def __init__(self, message: str, next_max_tokens: int) -> None:
        super().__init__(message)
        self.next_max_tokens = next_max_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.next_max_tokens)


class ParityError(FoveaError, RuntimeError):
    """Log-probs of engine and trainer for the same tokens differ by more than the limit."""


class TrackerError(FoveaError, RuntimeError):
    """An experiment tracker that cannot be reached or rejects the data."""


_OUT_OF_MEMORY = re.compile(
    "can't allocate memory|out of memory|bad_alloc|ALLOC_FAILED|could not create a (primitive|memory object)(?! desc)"
)
"""RuntimeError messages of torch's CPU allocator, CUDA, the C++ library, cuBLAS, and oneDNN, which gives no cause."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error means that an allocation failed, on the host or on a device."""
    # torch.OutOfMemoryError is also a RuntimeError
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    )


@contextmanager
def memory_for(what: str, fix: str) -> Iterator[None]:
    """Turn a failed allocation in this context into OutOfMemoryError with the name of the work and the fix."""
    try:
        yield
    except FoveaError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"memory ran out in {what}; {fix}") from error


def broken_checkpoint(error: Exception) -> str:
    """Error text for a checkpoint that cannot be read: the cause in one line, and the fix."""
    reason = str(error).split(". ")[0].split("\n")[0]  # torch's messages have several paragraphs
    return f"this checkpoint cannot be read ({reason}); delete its folder to resume from the one before it"
