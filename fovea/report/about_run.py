"""The settings and the console output of a run for its page, cut to a maximum size."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fovea.metrics.progress import CONSOLE_FILE
from fovea.report.about import read_hints
from fovea_gym.utils.bounded import open_file
from fovea_gym.utils.shown_text import printable, without_secrets

MAX_CONSOLE_BYTES = 128 * 1024
"""The page shows this many bytes from the end of the console output."""
MAX_VALUE_CHARS = 2000
TOO_MANY_STEPS = 10**15
"""Python refuses to print an integer of more than 4,300 digits, and YAML can hold one in hexadecimal."""
MAX_HINTS, MAX_HINT_CHARS = 20, 1000


def settings_pairs(settings: object) -> list[list[str]]:
    """Settings that were parsed from YAML, as pairs of `section.key` and value."""
    pairs = _flat("", settings) if isinstance(settings, Mapping) else ()
    return [[key, _cut(value, MAX_VALUE_CHARS)] for key, value in pairs]


def max_steps_of(settings: object) -> int | None:
    """The setting max_steps; None if it is not a number of steps that a run could take."""
    value = settings.get("max_steps") if isinstance(settings, Mapping) else None
    return value if isinstance(value, int) and 0 < value < TOO_MANY_STEPS else None


def console_bytes(run_dir: Path) -> int:
    """The current size of the console output, which grows while the run prints."""
    file = run_dir / CONSOLE_FILE
    return file.stat().st_size if file.exists() else 0


def console_text(run_dir: Path) -> str:
    """The newest lines of the console output; empty for a run of an older version, which did not store it."""
    try:
        with open_file(run_dir / CONSOLE_FILE, within=run_dir) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MAX_CONSOLE_BYTES))
            content = file.read(MAX_CONSOLE_BYTES)
    except FileNotFoundError:
        return ""
    whole = content if size <= MAX_CONSOLE_BYTES else content.partition(b"\n")[2]
    return printable(without_secrets(whole.decode("utf-8", errors="replace")))


def hints(run_dir: Path) -> list[str]:
    """Hints that the run has stored for its report, for example that the reward is constant."""
    return [_cut(hint, MAX_HINT_CHARS) for hint in read_hints(run_dir)[:MAX_HINTS]]


def _flat(prefix: str, settings: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", _text(value)


def _text(value: object) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    except ValueError:
        return "a number with thousands of digits"


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]} ... ({len(text):,} characters)"
