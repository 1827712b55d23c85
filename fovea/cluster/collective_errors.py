"""The errors of gloo and NCCL in a call whose other ranks have ended, or do not come, in words of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fovea.errors import FoveaError, LostRankError

_TIMEOUT = re.compile("timed out|timeout", re.IGNORECASE)


@contextmanager
def lost_ranks(call: str) -> Iterator[None]:
    """A call in which LostRankError takes the place of errors of the process group."""
    try:
        yield
    except FoveaError:
        raise
    except RuntimeError as error:
        # gloo has no error type of its own
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        if _TIMEOUT.search(str(error)):
            raise LostRankError(
                f"a collective call in {call} did not end within cluster.collective_timeout_seconds, so that a rank is "
                "stuck or lost; start again to go on from the last checkpoint, or raise it where a call is that long"
            ) from error
        raise LostRankError(
            f"another rank has left a collective call in {call}; its own message, if it had time for one, is above; "
            "start again to go on from the last checkpoint"
        ) from error
