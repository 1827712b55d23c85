"""Experiment trackers (TensorBoard, W&B, MLflow, SwanLab): their protocol, and what all of them are sent."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from PIL.Image import Image

from fovea_gym.utils.shown_text import printable

MAX_NAME_LENGTH = 240
"""Of a metric; MLflow allows 250 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedSample:
    """An image that the policy was shown, with the text under it."""

    image: Image
    caption: str
    """Prompt, truth, and an answer with its reward, as plain text."""


class Tracker(Protocol):
    """A connection to one run of a tracker. Each method may raise anything; only the making of it ends a new run."""

    def begin(self, settings: Mapping[str, object]) -> None:
        """Keep the settings, nested mappings; called once in the life of a run, before its first step."""

    def write(self, step: int, metrics: Mapping[str, float], samples: Sequence[TrackedSample]) -> None:
        """Keep the metrics, which may be NaN or infinite, and the samples of a step."""

    def close(self) -> None:
        """End the connection when all is sent."""


@runtime_checkable
class ConnectsTracker(Protocol):
    """Settings of a tracker in another package, which connect to it."""

    def connect(self, run_dir: Path, run_id: str) -> Tracker:
        """Connect to the tracker's run `run_id`, which goes on if the tracker has it; `run_dir` is the run folder."""
        ...


def readable(text: str) -> str:
    """Text of rows and models as every tracker can store it: valid Unicode, without control characters."""
    return printable(text).encode(errors="replace").decode()


def plain_name(name: str) -> str:
    """The name of a metric as MLflow and SwanLab take it: letters, digits, `_ . - /` and spaces, a path within itself.

    A name that changes gets a hash of what it was, so that no two become one.
    """
    plain = re.sub(r"[^\w.\-/ ]", "_", name)[:MAX_NAME_LENGTH]
    plain = "/".join(part.strip(" .") for part in posixpath.normpath(plain).split("/")).strip("/") or "_"
    if plain == name:
        return name
    return f"{plain}_{hashlib.sha256(name.encode()).hexdigest()[:6]}"
