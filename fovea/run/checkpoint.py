"""Checkpoints of a run: `checkpoints/step-N/` is complete or absent, never half, and damage to one is found.

What was damaged later, by a disk or by hand, does not match its manifest: a run resumes from the checkpoint before it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from fovea.errors import DataError
from fovea.run.disk import folder_bytes, room_for
from fovea.run.kept import Kept
from fovea.run.manifest import damage, write_manifest
from fovea.train.base import Policy
from fovea.utils.files import atomic_folder

STATE = "state.json"
SAVED_BYTES_PER_PARAMETER = 12
"""A float32 weight and AdamW's two moments of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A saved checkpoint, as read from its folder."""

    folder: Path
    step: int
    """RL steps taken."""
    state: Mapping[str, Any]
    """State of the run besides the policy: data order, accuracies, seconds."""
    passed_over: tuple[Path, ...] = ()
    """Later checkpoints, which are damaged; newest first."""


class _Saved(dict[str, Any]):
    """A checkpoint's state; DataError for a missing key."""

    def __init__(self, folder: Path, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._folder = folder

    def __missing__(self, key: str) -> NoReturn:
        raise DataError(
            f"{self._folder}: this checkpoint has no {key!r}, so another version of Fovea wrote it; resume the "
            "run with that version, or start anew with another run_dir"
        )


class DamagedCheckpointError(DataError):
    """A checkpoint whose files are not those that were written."""


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self._root = run_dir / "checkpoints"
        self._keep = keep

    async def save(self, step: int, policy: Policy, state: Mapping[str, Any], kept: Kept | None = None) -> None:
        """Write a checkpoint atomically, then delete all but the newest `keep` and those of `kept`."""
        final = self._root / f"step-{step}"
        if final.exists():
            return  # the last regular checkpoint is also the one at the end
        self._root.mkdir(parents=True, exist_ok=True)
        needed_bytes = max(_estimated_bytes(policy), *map(folder_bytes, self._folders()), 0)
        with room_for(f"the checkpoint of step {step}", self._root, needed_bytes), atomic_folder(final) as folder:
            await policy.save(folder)
            (folder / STATE).write_text(json.dumps({"step": step, **state}))
            write_manifest(folder)
        folders = self._folders()
        beyond = kept.steps([_step_of(folder) for folder in folders]) if kept else set()
        for old in folders[: -self._keep]:
            if _step_of(old) not in beyond:
                _delete(old)

    @property
    def newest(self) -> Path | None:
        """Folder of the newest checkpoint, damaged or not; None before the first."""
        return next(reversed(self._folders()), None)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None before the first, DataError when all are damaged."""
        damaged: list[DamagedCheckpointError] = []
        folders = self._folders()[::-1]
        for folder in folders:
            try:
                return replace(read_checkpoint(folder), passed_over=tuple(folders[: len(damaged)]))
            except DamagedCheckpointError as error:
                damaged.append(error)
        if damaged:
            raise DataError(f"{damaged[0]}, and no checkpoint before it is whole; start anew in another run_dir")
        return None

    def resume(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, for a run to go on from; clears away what is in the way of its saves.

        Later checkpoints, which are damaged, are renamed `step-N.damaged`; remains of interrupted saves and deletions
        are deleted. Only for the process that holds the lock of the run folder.
        """
        for remains in (*self._root.glob(".step-*.partial"), *self._root.glob(".step-*.deleted")):
            shutil.rmtree(remains)
        found = self.latest()
        for folder in found.passed_over if found else ():
            aside = folder.with_name(f"{folder.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        return found

    def _folders(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        # other names, such as a copy that the user made, are not ours to delete
        found = (folder for folder in self._root.glob("step-*") if folder.name.removeprefix("step-").isdecimal())
        return sorted(found, key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _estimated_bytes(policy: Policy) -> int:
    """Size of a checkpoint, from the number of trained parameters; the first ones, without moments, are smaller."""
    return SAVED_BYTES_PER_PARAMETER * sum(part.trainable for part in policy.describe().parameters)


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder; DamagedCheckpointError where its files are not those that were written."""
    problem = damage(folder)
    if problem is not None:
        raise DamagedCheckpointError(f"{folder}: this checkpoint is damaged: {problem}")
    state = json.loads((folder / STATE).read_text(), object_hook=partial(_Saved, folder))
    step = state.pop("step")
    if folder.name != f"step-{step}":
        raise DamagedCheckpointError(f"{folder}: this checkpoint is damaged: its {STATE} is of step {step}")
    return Checkpoint(folder=folder, step=step, state=state)


def _delete(folder: Path) -> None:
    """Delete a checkpoint atomically."""
    # renamed first: an interrupted deletion must not leave half a checkpoint
    doomed = folder.with_name(f".{folder.name}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)
