"""Checkpoints of a run, written during the next steps: `checkpoints/step-N/` is either complete or absent.

A checkpoint that was damaged later, by a disk or by hand, does not match its manifest; a run then resumes from the
checkpoint before it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

from fovea.errors import TrainError, broken_checkpoint
from fovea.run.fingerprint import library_versions
from fovea.run.run_dir import checkpoint_folders, holds_files, step_of
from fovea.train.base import Policy
from fovea.types import Metrics
from fovea_gym.errors import DataError, FoveaError, first_line
from fovea_gym.utils.bounded import check_inside, check_tree, read_file
from fovea_gym.utils.event_loop import in_background
from fovea_gym.utils.files import atomic_folder

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files in a folder."""
    files = {
        path.relative_to(folder).as_posix(): {key: measure(path) for key, measure in _MEASURES.items()}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    (folder / MANIFEST).write_text(json.dumps(files, indent=1))


def damage(folder: Path) -> str | None:
    """The first difference of a folder from its manifest, such as `policy.json is missing`; None if it is intact."""
    try:
        check_tree(folder)
        expected = json.loads(read_file(folder / MANIFEST))
        for key, measure in _MEASURES.items():
            for name, entry in expected.items():
                check_inside(folder / name, folder)
                if measure(folder / name) != entry[key]:
                    return f"{name} differs from what was written"
    except DataError as error:
        return str(error).partition(";")[0]
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(folder)} is missing"
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"its {MANIFEST} cannot be read ({first_line(error)})"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_MEASURES: Mapping[str, Callable[[Path], int | str]] = {
    "bytes": lambda path: path.stat().st_size,
    "sha256": _sha256,
}
"""Maps the name of a manifest entry to its function; the size comes first, since it costs nothing."""


def folder_bytes(folder: Path) -> int:
    """Size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def room_for(what: str, folder: Path, needed_bytes: int) -> Iterator[None]:
    """Within the block, about `needed_bytes` are written into an existing folder; TrainError if they do not fit."""
    free_bytes = shutil.disk_usage(folder).free
    figures = f"it needs about {_shown(needed_bytes)}, and {_shown(free_bytes)} are free in {folder}"
    way_out = "make room there and continue with resume=auto"
    if free_bytes < needed_bytes:
        raise TrainError(f"there is no room for {what}: {figures}; {way_out}")
    try:
        yield
    except OSError as error:
        raise TrainError(f"{what} could not be written ({error.strerror or error}): {figures}; {way_out}") from error


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedCheckpoints:
    """Steps that decide which checkpoints are kept besides the newest; every checkpoint stores them."""

    best_step: int | None = None
    """Step with the best dev accuracy; None without `checkpoint.keep_best`, or before the first dev evaluation."""
    best_reading: float = 0.0
    skipped_since: int | None = None
    """First step of the current series of skipped updates; None if the last update was not skipped."""

    def after_step(self, step: int, metrics: Mapping[str, float], *, keep_best: bool) -> RetainedCheckpoints:
        """The retained steps after another step, whose metrics may include a dev accuracy."""
        retained = self
        if not metrics.get("updates_skipped", 0.0):
            retained = replace(retained, skipped_since=None)
        elif retained.skipped_since is None:
            retained = replace(retained, skipped_since=step)
        reading = metrics.get("accuracy/dev")
        if keep_best and reading is not None and (retained.best_step is None or reading > retained.best_reading):
            retained = replace(retained, best_step=step, best_reading=reading)
        return retained

    def steps(self, saved: Sequence[int]) -> set[int]:
        """The steps, among the saved ones, whose checkpoints are kept besides the newest."""
        before = [step for step in saved if self.skipped_since is not None and step < self.skipped_since]
        return {step for step in saved if step == self.best_step} | set(before[-1:])


STATE = "state.json"
FORMAT = 2
"""Version of the file format of a checkpoint. Version 1 had single files of whole tensors and a torch file."""
SAVED_BYTES_PER_PARAMETER = 12
"""Bytes of a float32 weight and its two AdamW moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A saved checkpoint, as read from its folder."""

    folder: Path
    step: int
    state: Mapping[str, Any]
    """State of the run besides the policy: data order, accuracies, seconds."""
    passed_over: tuple[Path, ...] = ()
    """Later checkpoints that were skipped because they are damaged, newest first."""


class _Saved(dict[str, Any]):
    """A checkpoint's state; DataError for a missing key."""

    def __init__(self, folder: Path, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._folder = folder

    def __missing__(self, key: str) -> NoReturn:
        raise DataError(
            f"{self._folder}: this checkpoint has no {key!r}, so another version of Fovea wrote it; resume the "
            "run with that version, or start over in another run_dir"
        )


class DamagedCheckpointError(DataError):
    """The files of a checkpoint have changed since they were written."""


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self._root = run_dir / "checkpoints"
        self._keep = keep
        self._writing: Future[None] | None = None
        self._seconds: list[float] = []

    async def save(self, step: int, policy: Policy, state: Mapping[str, Any], retained: RetainedCheckpoints) -> None:
        """Wait for the previous checkpoint, copy the state, and begin to write it in the background.

        Afterwards all checkpoints are deleted except the newest `keep` and those of `retained`.
        """
        await self.finish()
        final = self._root / f"step-{step}"
        if holds_files(final):
            return  # the last regular checkpoint may also be the one at the end of the run
        self._root.mkdir(parents=True, exist_ok=True)
        needed_bytes = max(estimated_bytes(policy), *map(folder_bytes, self._folders()), 0)
        started = perf_counter()
        with ExitStack() as opening:
            opening.enter_context(room_for(f"the checkpoint of step {step}", self._root, needed_bytes))
            folder = opening.enter_context(atomic_folder(final))
            # as text, since the run will change the objects in it
            (folder / STATE).write_text(json.dumps({"format": FORMAT, "step": step, **state}))
            await policy.save(folder)
            opened = opening.pop_all()
        loop = asyncio.get_running_loop()

        def write() -> None:
            with opened:
                asyncio.run_coroutine_threadsafe(policy.finish_save(), loop).result()
                write_manifest(folder)
            self._delete_old(retained)
            self._seconds.append(perf_counter() - started)

        self._writing = in_background(write, f"checkpoint of step {step}")

    async def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete; TrainError if it could not be written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await asyncio.wrap_future(writing)

    async def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, without waiting for one in progress."""
        if self._writing is not None and self._writing.done():
            await self.finish()

    def metrics(self) -> Metrics:
        """Seconds that the last checkpoint took to write, if one was finished since the last call."""
        seconds, self._seconds = self._seconds, []
        return {"seconds/checkpoint_write": seconds[-1]} if seconds else {}

    def _delete_old(self, retained: RetainedCheckpoints) -> None:
        folders = self._folders()
        beyond = retained.steps([step_of(folder) for folder in folders])
        for old in folders[: -self._keep]:
            if step_of(old) not in beyond:
                # renamed first: an interrupted deletion must not leave half a checkpoint
                shutil.rmtree(_renamed(old, f".{old.name}.deleted"))

    @property
    def newest(self) -> Path | None:
        """Folder of the newest checkpoint, damaged or not."""
        return next(reversed(self._folders()), None)

    def latest(self) -> SavedCheckpoint | None:
        """The newest intact checkpoint; None before the first one, DataError if all are damaged."""
        damaged: list[DamagedCheckpointError] = []
        folders = self._folders()[::-1]
        for folder in folders:
            try:
                return replace(read_checkpoint(folder), passed_over=tuple(folders[: len(damaged)]))
            except DamagedCheckpointError as error:
                if not folder.exists():  # a run in progress has deleted it, and has written a newer one
                    return self.latest()
                damaged.append(error)
        if damaged:
            raise DataError(f"{damaged[0]}, and no earlier checkpoint is intact; start over in another run_dir")
        return None

    def resume(self) -> SavedCheckpoint | None:
        """The newest intact checkpoint, to resume from; the caller must hold the lock of the run folder.

        Later checkpoints, all damaged, are renamed `step-N.damaged`; remains of interrupted saves and deletions are
        deleted.
        """
        self._clear_remains()
        found = self.latest()
        for folder in found.passed_over if found else ():
            _renamed(folder, f"{folder.name}.damaged")
        return found

    def resume_from(self, folder: Path) -> SavedCheckpoint:
        """The checkpoint in a folder, to resume from, or DamagedCheckpointError; later ones of this run are renamed."""
        self._clear_remains()
        found = read_checkpoint(folder)
        if folder.resolve().parent == self._root.resolve():
            for other in self._folders():
                if step_of(other) > found.step:
                    _renamed(other, f"{other.name}.later")
        return found

    def _clear_remains(self) -> None:
        for remains in (*self._root.glob(".step-*.partial"), *self._root.glob(".step-*.deleted")):
            # the thread of a save that was cancelled in this process may be deleting it as well
            shutil.rmtree(remains, onerror=_raise_unless_gone)

    def _folders(self) -> list[Path]:
        """Folders of complete checkpoints, oldest first."""
        return checkpoint_folders(self._root.parent)


def _raise_unless_gone(_function: object, _path: str, error: tuple[Any, BaseException, Any]) -> None:
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def estimated_bytes(policy: Policy) -> int:
    """Estimated size of a checkpoint, from the number of trained parameters; those without moments are smaller."""
    return SAVED_BYTES_PER_PARAMETER * policy.describe().num_saved


def read_checkpoint(folder: Path) -> SavedCheckpoint:
    """Read the checkpoint in a folder; DamagedCheckpointError if its files have changed since they were written."""
    problem = damage(folder)
    if problem is not None:
        raise DamagedCheckpointError(f"{folder}: this checkpoint is damaged: {problem}")
    try:
        state = json.loads(read_file(folder / STATE), object_hook=partial(_Saved, folder))
        _check_format(folder, state)
        step = state.pop("step")
    except FoveaError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{folder}: this checkpoint is damaged: {broken_checkpoint(error)}") from error
    if folder.resolve().name != f"step-{step}":
        raise DamagedCheckpointError(f"{folder}: this checkpoint is damaged: its {STATE} names step {step}")
    return SavedCheckpoint(folder=folder, step=step, state=state)


def _check_format(folder: Path, state: dict[str, Any]) -> None:
    found = state.pop("format", 1)
    if found != FORMAT:
        writer = library_versions(state.get("fingerprint", {})).get("fovea", "of another version")
        raise DataError(
            f"{folder}: this checkpoint has format {found}, and this version of Fovea reads format {FORMAT}; Fovea "
            f"{writer} wrote it: resume or export it with that version, or start over in another run_dir"
        )


def is_checkpoint(folder: Path) -> bool:
    """True if a folder is a checkpoint, intact or damaged, and not a run or a model."""
    return any((folder / name).is_file() for name in (STATE, MANIFEST))


def _renamed(folder: Path, name: str) -> Path:
    """Rename a folder, and delete whatever had the new name; returns the new path."""
    shutil.rmtree(folder.with_name(name), ignore_errors=True)
    return folder.rename(folder.with_name(name))
