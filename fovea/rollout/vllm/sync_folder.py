"""Weight syncs as files, in a folder that the trainer and the servers share."""

from __future__ import annotations

import fcntl
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import torch
from safetensors.torch import save
from torch import Tensor

from fovea.errors import EngineError
from fovea.utils.checksum import read_hashes, value_hash

SYNC_NAME = re.compile(r"run-[0-9a-f]{16}/[0-9]{1,9}")
"""Name of a weight sync: the folder of its run, and its own folder in it."""
LOCK_NAME = f"{socket.gethostname()}.lock"
"""File in a run's folder that its trainer keeps locked; some network file systems hide the lock from other machines."""
OTHER_RUN = "another run has sent its weights since; give every run its own servers"


def run_of(sync: str) -> str:
    """Return the run that a weight sync belongs to, from the name of the weight sync."""
    return sync.partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """A weight sync: all weights of one version, as files in a folder."""

    name: str
    """Name of the folder, unique over all runs; a version number would not be, since it can repeat."""
    hashes: dict[str, int] = field(default_factory=dict)
    """Hashes of the values in the servers' dtype, by checkpoint names."""
    hashes_there: dict[str, int] = field(default_factory=dict)
    """The same hashes by vLLM's names."""


class SyncFolder:
    """Writes each weight sync to a folder, one file per bucket, and deletes older weight syncs."""

    def __init__(self, root: Path, dtype: torch.dtype, vllm_name: Callable[[str], str]) -> None:
        self._root = root
        self._dtype = dtype
        self._vllm_name = vllm_name
        self.run = f"run-{secrets.token_hex(8)}"
        """Unique name of this run."""
        self._lock: TextIO | None = None
        self._sync: Sync | None = None
        self._older: list[Sync] = []
        """Weight syncs before the last one, including failed ones that were never loaded."""
        self._num_files = self._num_syncs = 0

    def begin(self) -> None:
        """Create the folder of a new weight sync; EngineError if that fails."""
        sync = Sync(name=f"{self.run}/{self._num_syncs}")
        with self._writing():
            if self._lock is None:
                self._lock = self._make_run()
            (self._root / sync.name).mkdir()
        self._num_syncs += 1
        if self._sync is not None:
            self._older.append(self._sync)
        self._sync, self._num_files = sync, 0

    def write(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Write a bucket of weights to its own file."""
        assert self._sync is not None, "no weight sync has begun"
        held = {name: tensor.detach().to(self._dtype).cpu().contiguous() for name, tensor in bucket}
        with self._writing():
            # safetensors' own writer creates files with mode 600, whatever the mode of their folder
            (self._root / self._sync.name / f"{self._num_files:05d}.safetensors").write_bytes(save(held))
        self._num_files += 1
        (hashes,) = read_hashes([value_hash(tensor, self._dtype) for tensor in held.values()])
        for name, bits in zip(held, hashes, strict=True):
            self._sync.hashes[name] = bits
            self._sync.hashes_there[self._vllm_name(name)] = bits

    def finish(self) -> Sync:
        """Return the weight sync, which is complete now."""
        assert self._sync is not None, "no weight sync has begun"
        return self._sync

    def delete_older(self) -> None:
        """Delete the weight syncs before the last one; no server needs them any longer."""
        while self._older:
            shutil.rmtree(self._root / self._older.pop().name, ignore_errors=True)

    def delete(self) -> None:
        """Delete the folder of this run, and release its lock."""
        shutil.rmtree(self._root / self.run, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Context manager that turns a failed write into an EngineError."""
        try:
            yield
        except OSError as error:
            raise EngineError(
                f"rollout.engine.weights_dir={self._root}: {error.strerror}; it must be writable, with room for two "
                "copies of the weights"
            ) from error

    def _make_run(self) -> TextIO:
        """Create the folder of this run, and delete folders of runs on this machine whose trainers were killed."""
        self._root.mkdir(parents=True, exist_ok=True)
        for lock in self._root.glob(f"run-*/{LOCK_NAME}"):
            with suppress(OSError), _locked(lock):
                shutil.rmtree(lock.parent, ignore_errors=True)
        # under another name until it is locked, so that no other trainer deletes it
        new = self._root / f"new-{self.run}"
        new.mkdir()
        locked = _locked(new / LOCK_NAME)
        new.rename(self._root / self.run)
        return locked


def _locked(file: Path) -> TextIO:
    """Open and lock a file; the kernel unlocks it when this process ends. OSError if another process holds the lock."""
    opened = file.open("w")
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        opened.close()
        raise
    return opened
