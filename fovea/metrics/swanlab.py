"""SwanLab as a tracker; the only file that imports swanlab (extra: swanlab)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from fovea.metrics.tracker import TrackedSample, plain_name
from fovea.utils.installing import pip_install
from fovea_gym.errors import ConfigError, MissingExtraError, first_line

try:
    import swanlab
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"log.swanlab_project is set, but {error.name} is not installed; {pip_install('swanlab')}, or set "
        "log.swanlab_project=null"
    ) from error


class SwanlabTracker:
    """A SwanLab run with the given id; an existing run is continued.

    Non-finite metrics are left out. With SWANLAB_MODE=offline each attempt of a run is a folder in swanlog/; all of
    them have the same id, and `swanlab sync` joins them on the server.
    """

    def __init__(self, run_dir: Path, *, project: str, run_id: str) -> None:
        try:
            self._run = swanlab.init(
                project=project,
                name=run_dir.name,
                id=run_id,
                resume="allow",
                log_dir=str(run_dir / "swanlog"),
                # its copy of the terminal output would contain the live display
                settings=swanlab.Settings(terminal={"proxy_type": "none"}),
            )
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"log.swanlab_project={project}: {first_line(error)}; run `swanlab login`, set SWANLAB_API_KEY, or set "
                "SWANLAB_MODE=offline to log only on this machine"
            ) from error

    def begin(self, settings: Mapping[str, object]) -> None:
        self._run.config.update(dict(settings))

    def write(self, step: int, metrics: Mapping[str, float], samples: Sequence[TrackedSample]) -> None:
        images = [swanlab.Image(sample.image, caption=sample.caption) for sample in samples]
        finite = {plain_name(name): value for name, value in metrics.items() if math.isfinite(value)}
        self._run.log(finite | ({"samples": images} if images else {}), step=step)

    def close(self) -> None:
        self._run.finish()
