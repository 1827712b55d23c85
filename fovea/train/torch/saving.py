"""The writing of a policy's tensors in the background, one checkpoint at a time."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from torch import Tensor

from fovea.errors import TrainError
from fovea.train.ranks import Ranks
from fovea.train.torch.checkpoint import save_counts
from fovea.train.torch.shards import StagedShards
from fovea.utils.background import in_background


class Saving:
    """A rank's share of the checkpoints of a policy."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._writing: Future[None] | None = None

    def begin(self, folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], counts: Mapping[str, int]) -> None:
        """Copy tensors to host memory, and begin to write this rank's shards of each set to its folder in `folder`.

        TrainError where this rank does not see the folder.
        """
        assert self._writing is None, "the checkpoint before is not finished"
        self._ranks.run_on_each(partial(_check_seen, folder))
        staged = {name: StagedShards.of(each, self._ranks) for name, each in tensors.items()}

        def write() -> None:
            for name, shards in staged.items():
                shards.write(folder / name, self._ranks.rank)
            if self._ranks.is_first:
                save_counts(folder, counts)

        self._writing = in_background(write, "checkpoint")

    def finish(self) -> None:
        """Wait until all of it is on disk; an error of the writing is raised here."""
        assert self._writing is not None, "no checkpoint was begun"
        writing, self._writing = self._writing, None
        writing.result()


def _check_seen(folder: Path) -> None:
    if not folder.is_dir():
        raise TrainError(
            f"{folder} is not there on {socket.gethostname()}, so that its part of a checkpoint cannot be written; put "
            "run_dir on storage that all machines see under one path"
        )
