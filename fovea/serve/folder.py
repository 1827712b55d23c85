"""The model folder that a server is started on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from fovea.build.targets import CheckpointTarget, ModelTarget, parse_target
from fovea.errors import ConfigError
from fovea.exporting.export import export, step_of
from fovea.utils.bounded import check_inside

EXPORTS = "exports"
"""Folder of a run with the exports that it was served from."""


def served_folder(source: str, say: Callable[[str], None], *, trust: bool = False) -> Path:
    """The folder of a model, or the export of a run's newest checkpoint or of one that is named.

    An export is written below the run folder, once for each checkpoint. ConfigError for what is neither.
    """
    target = parse_target(source)
    if isinstance(target, CheckpointTarget):
        folder = target.run / EXPORTS / f"step-{step_of(target)}"
        check_inside(folder, target.run)
        # a run that was trained again to this step has another checkpoint
        if folder.exists() and folder.stat().st_mtime < target.folder.stat().st_mtime:
            shutil.rmtree(folder)
        if not folder.exists():
            say(f"exporting {target.name} to {folder}")
            export(target.folder, folder, trust=trust)
        return folder
    if isinstance(target, ModelTarget) and target.adapter is not None:
        raise ConfigError(f"{source}: an adapter without its model; serve the run, or an export without --adapter-only")
    if isinstance(target, ModelTarget) and Path(target.path).is_dir():
        return Path(target.path)
    raise ConfigError(f"{source}: not a folder; serve a run, a checkpoint, or the folder of a model (fovea export)")
