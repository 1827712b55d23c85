"""Exception types and the failure policy.

* User errors (a setting, a file, a row) are a FoveaError of one line: what was set, why it fails, the fix. The command
  line prints that line; `--debug` adds the traceback.
* Whatever is dropped on purpose (a bad row, a group without signal) is counted in the metrics, never silent.
* Invariants of our own code are `assert` statements with the values in their messages.
* All other exceptions propagate. What catches `Exception` cleans up and raises it again, or hands it to whoever waits
  for the result: a future, the other ranks, the caller whose turn comes later.
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
    """A training step that cannot be completed: a batch that does not fit, non-finite losses or gradients."""


class LostWorkerError(ClusterError):
    """A worker process that has ended, or was killed since it hung; a request to its engine may go to another one."""


class LostEngineError(ClusterError):
    """A rollout engine whose own processes have ended or hang; its requests may go to another one."""


class LostRankError(ClusterError):
    """A collective call that another rank has left, or has not come to; that one may know why."""


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


class TrackerError(FoveaError, RuntimeError):
    """An experiment tracker that cannot be reached, or refuses what it is sent."""


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


def broken_checkpoint(error: Exception) -> str:
    """Error text for a checkpoint that cannot be read: the cause in one line, and the fix."""
    reason = str(error).split(". ")[0].split("\n")[0]  # torch's messages go on for paragraphs
    return f"this checkpoint cannot be read ({reason}); delete its folder to resume from the one before it"
