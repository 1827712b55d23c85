"""Experiment trackers (TensorBoard, W&B, MLflow, SwanLab): their protocol, and the data that they receive."""

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
"""Longest metric name; MLflow allows 250 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedSample:
    """An image that the policy was shown, with a caption."""

    image: Image
    caption: str
    """Prompt, truth, and an answer with its reward, as plain text."""


class Tracker(Protocol):
    """A connection to one run of a tracker. Any method may raise any error; only a failed connection ends a new run."""

    def begin(self, settings: Mapping[str, object]) -> None:
        """Store the settings (nested mappings); called once per run, before its first step."""

    def write(self, step: int, metrics: Mapping[str, float], samples: Sequence[TrackedSample]) -> None:
        """Store the metrics, which may be NaN or infinite, and the samples of a step."""

    def close(self) -> None:
        """Close the connection once everything is sent."""


@runtime_checkable
class ConnectsTracker(Protocol):
    """Settings of a tracker in another package, with a method to connect to it."""

    def connect(self, run_dir: Path, run_id: str) -> Tracker:
        """Connect to the tracker's run `run_id`, which continues if it exists; `run_dir` is the run folder."""
        ...


def readable(text: str) -> str:
    """Clean text of rows and models for trackers: valid Unicode without control characters."""
    return printable(text).encode(errors="replace").decode()


def plain_name(name: str) -> str:
    """A metric name that MLflow and SwanLab accept: a relative path of letters, digits, `_ . - /` and spaces.

    A name that has to change gets a hash of the original, so that two names never become the same.
    """
    plain = re.sub(r"[^\w.\-/ ]", "_", name)[:MAX_NAME_LENGTH]
    plain = "/".join(part.strip(" .") for part in posixpath.normpath(plain).split("/")).strip("/") or "_"
    if plain == name:
        return name
    return f"{plain}_{hashlib.sha256(name.encode()).hexdigest()[:6]}"
