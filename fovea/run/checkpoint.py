"""Checkpoints of a run: `checkpoints/step-N/` is complete or absent, never half."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from fovea.errors import DataError, broken_checkpoint
from fovea.train.base import Policy
from fovea.utils.files import atomic_folder

STATE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A saved checkpoint, as read from its folder."""

    folder: Path
    step: int
    """RL steps taken."""
    state: Mapping[str, Any]
    """State of the run besides the policy: data order, accuracies, seconds."""


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


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self._root = run_dir / "checkpoints"
        self._keep = keep

    async def save(self, step: int, policy: Policy, state: Mapping[str, Any]) -> None:
        """Write a checkpoint atomically, then delete all but the newest `keep`."""
        final = self._root / f"step-{step}"
        if final.exists():
            return  # the last regular checkpoint is also the one at the end
        with atomic_folder(final) as folder:
            await policy.save(folder)
            (folder / STATE).write_text(json.dumps({"step": step, **state}))
        for old in self._folders()[: -self._keep]:
            _delete(old)

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint; DataError when it cannot be read."""
        folders = self._folders()
        if not folders:
            return None
        try:
            written = (folders[-1] / STATE).read_text()
            state = json.loads(written, object_hook=partial(_Saved, folders[-1]))
            return Checkpoint(folder=folders[-1], step=state.pop("step"), state=state)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{folders[-1]}: {broken_checkpoint(error)}") from error

    def _folders(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        # other names, such as a copy that the user made, are not ours to delete
        found = (folder for folder in self._root.glob("step-*") if folder.name.removeprefix("step-").isdecimal())
        return sorted(found, key=lambda folder: int(folder.name.removeprefix("step-")))


def _delete(folder: Path) -> None:
    """Delete a checkpoint atomically."""
    # renamed first: an interrupted deletion must not leave half a checkpoint
    doomed = folder.with_name(f".{folder.name}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)
