"""The page of some runs as a folder of static files, which opens from file:// and from any web server.

A browser reads no JSON from file:// addresses. So every answer of the server is a script, which hands its value to the
page.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from fovea.errors import ConfigError, DataError
from fovea.report.images import read_image
from fovea.report.samples import read_step
from fovea.utils.files import atomic_folder
from fovea.view.curves import Total
from fovea.view.page_files import PAGE_FILES, page_file
from fovea.view.viewed_run import ViewedRun

_POLICY = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'self' file:; "
    "style-src 'self' file:; img-src 'self' file:; base-uri 'none'; form-action 'none'\">"
)
"""A folder has no headers. `file:` is for browsers in which 'self' means nothing there."""


def export(runs: Sequence[ViewedRun], folder: Path) -> Path:
    """Write index.html and what it shows into a new folder; returns the path of index.html.

    ConfigError where the folder holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--export {folder}: it is not empty; give a new folder")
    with atomic_folder(folder) as partial:
        _write_page(partial)
        _write_data(partial, "runs", [run.facts() | {"folder": run.folder.name} for run in runs])
        for place, run in enumerate(runs):
            _write_run(partial, place, run)
    return folder / "index.html"


def _write_page(folder: Path) -> None:
    for name in PAGE_FILES:
        (folder / name).write_text(page_file(name), encoding="utf-8")
    exported = (
        page_file("index.html")
        .replace("<head>", f"<head>\n{_POLICY}")
        .replace('<html lang="en">', '<html lang="en" data-exported>')
    )
    (folder / "index.html").write_text(exported, encoding="utf-8")


def _write_run(folder: Path, place: int, run: ViewedRun) -> None:
    for number in range(len(run.facts()["metrics"])):
        _write_data(folder, f"curve/{place}/{number}", run.curve(number))
    for number in range(len(get_args(Total))):
        _write_data(folder, f"totals/{place}/{number}", run.totals(number))
    for number in range(len(run.facts()["evaluations"])):
        _write_data(folder, f"answers/{place}/{number}", run.answers(number))
    _write_data(folder, f"about/{place}/0", run.settings_and_console())
    entries = run.entries(0)
    _write_script(folder, f"entries/{place}/0", entries)
    for step in {step for step, _groups in json.loads(entries)}:
        try:
            shown, images = run.step(step), _images(run, step)
        except (FileNotFoundError, DataError):
            continue  # the page says so where it is asked for
        _write_data(folder, f"step/{place}/{step}", shown)
        for name in images:
            _copy_image(run, name, folder / "images" / str(place))


def _images(run: ViewedRun, step: int) -> set[str]:
    """Names of all images of a step."""
    records = read_step(run.folder, step)
    of_prompts = {image.name for record in records for image in record.images}
    turns = (turn for record in records for answer in record.answers for turn in answer.turns)
    return of_prompts | {image.name for turn in turns for image in turn.images}


def _copy_image(run: ViewedRun, name: str, folder: Path) -> None:
    target = folder / f"{name}.png"
    if not target.exists() and (png := read_image(run.folder, name)) is not None:
        folder.mkdir(parents=True, exist_ok=True)
        target.write_bytes(png)


def _write_data(folder: Path, path: str, value: Any) -> None:
    _write_script(folder, path, json.dumps(value, allow_nan=False))


def _write_script(folder: Path, path: str, value: str) -> None:
    """Write the script that hands the page this JSON, which is ASCII with lone surrogates escaped."""
    target = folder / "data" / f"{path}.js"
    target.parent.mkdir(parents=True, exist_ok=True)
    # "<" is escaped too, for whoever puts the text into a page
    escaped = value.replace("<", "\\u003c")
    target.write_text(f"foveaData({json.dumps(path)}, {escaped});\n", encoding="ascii")
