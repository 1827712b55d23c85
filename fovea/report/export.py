"""The page as one file of HTML, style, script and data, which opens from file:// and loads no other file.

Each reply of the server is a JSON block in the file, whose id is the path that the page would request; pictures are
base64 blocks. Text from models and data sets occurs only in these blocks, where every "<" is escaped. A
Content-Security-Policy allows only the page's own script and style, and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from fovea.evaluation.records import AnsweredRow
from fovea.report.answers import step_json
from fovea.report.curves import Total
from fovea.report.images import read_image
from fovea.report.page_files import SCRIPT, STYLE, page_file
from fovea.report.viewed_run import ViewedRun
from fovea_gym.errors import ConfigError, DataError
from fovea_gym.utils.files import write_atomically

REPORT_FILE = "report.html"
MAX_STEPS, MAX_GROUPS, MAX_ANSWERS = 40, 8, 16
"""Maximum number of steps in a file, of groups per step and of answers per group; `fovea view` shows all."""
MAX_EVALUATIONS = 8
MAX_SAMPLE_MIB, MAX_ANSWER_MIB = 24, 8
"""Size limits for samples and for held-out answers, text and pictures, over all runs of a file."""
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PageData:
    """The data of a page: JSON texts by the path that the page requests, and PNG files by run and name."""

    values: dict[str, str] = field(default_factory=dict)
    images: dict[str, bytes] = field(default_factory=dict)

    def add(self, path: str, value: Any) -> None:
        self.values[path] = json.dumps(value, allow_nan=False)


def check_export(file: Path) -> None:
    """Raise ConfigError if a file's name does not end in .html."""
    if file.suffix != ".html" or file.is_dir():
        raise ConfigError(f"--export {file}: the page is one file; give a name that ends in .html")


def write_report(run_dir: Path) -> Path:
    """Write report.html of a finished or unfinished run; returns its path."""
    return export([ViewedRun(run_dir)], run_dir / REPORT_FILE)


def export(runs: Sequence[ViewedRun], file: Path) -> Path:
    """Write the page of these runs into one file; returns its path."""
    data = PageData()
    facts = [_add_run(data, place, run, len(runs)) for place, run in enumerate(runs)]
    data.add("runs", facts)
    write_page(file, data)
    return file


def write_page(file: Path, data: PageData) -> None:
    """Write the page and its data into one HTML file."""
    style, script = page_file(STYLE), page_file(SCRIPT)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    blocks = [
        # a browser could take a "<" in the JSON for the start of a tag
        *(_block("application/json", f"data/{path}", x.replace("<", "\\u003c")) for path, x in data.values.items()),
        *(_block("text/plain", f"images/{name}", base64.b64encode(png).decode()) for name, png in data.images.items()),
    ]
    page = (
        page_file("index.html")
        .replace('<html lang="en">', '<html lang="en" data-exported>')
        .replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">')
        .replace('<link rel="icon" href="icon.svg">\n', "")
        .replace(f'<link rel="stylesheet" href="{STYLE}">', f"<style>{style}</style>")
        .replace(f'<script defer src="{SCRIPT}"></script>\n', "")
        .replace("</body>", "\n".join([*blocks, f"<script>{script}</script>", "</body>"]))
    )
    write_atomically(file, page.encode())


def _block(media_type: str, name: str, text: str) -> str:
    return f'<script type="{media_type}" id="{name}">{text}</script>'


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _add_run(data: PageData, place: int, run: ViewedRun, num_runs: int) -> dict[str, Any]:
    """Add the data of a run; returns its facts, which list only the steps and evaluations that the file holds."""
    facts = run.facts()
    for number in range(len(facts["metrics"])):
        data.add(f"curve/{place}/{number}", run.curve(number))
    for number in range(len(get_args(Total))):
        data.add(f"totals/{place}/{number}", run.totals(number))
    data.add(f"about/{place}/0", run.settings_and_console())
    data.add(f"summary/{place}/0", run.summary())
    evaluations = _add_answers(data, place, run, facts["evaluations"], _Room(MAX_ANSWER_MIB / num_runs))
    entries: dict[int, Any] = dict(json.loads(run.entries(0)))  # a repeated step has a later entry, which wins
    kept = _add_steps(data, place, run, sorted(entries), _Room(MAX_SAMPLE_MIB / num_runs))
    data.add(f"entries/{place}/0", [[step, entries[step][:MAX_GROUPS]] for step in kept])
    return facts | {
        "folder": run.folder.name,  # the full path is private
        "evaluations": evaluations,
        "entries": len(kept),
        "newest_entry": max(kept, default=None),
        "left_out": _left_out(entries, kept),
    }


def _left_out(entries: Mapping[int, Sequence[Any]], kept: Sequence[int]) -> str:
    sizes = [(len(groups), group[-1]) for groups in entries.values() for group in groups]
    if len(kept) == len(entries) and all(n <= MAX_GROUPS and answers <= MAX_ANSWERS for n, answers in sizes):
        return ""
    return (
        f"This file holds {len(kept):,} of {len(entries):,} recorded steps, and of each at most {MAX_GROUPS} groups "
        f"with {MAX_ANSWERS} answers; `fovea view` shows all"
    )


class _Room:
    """The space that is left in the file for one kind of data, in bytes."""

    def __init__(self, mib: float) -> None:
        self._left = mib * MIB

    def takes(self, num_bytes: int) -> bool:
        """Reserve `num_bytes` if they fit; returns True if they do."""
        fits = num_bytes <= self._left
        self._left -= num_bytes if fits else 0
        return fits


def _add_answers(data: PageData, place: int, run: ViewedRun, names: Sequence[str], room: _Room) -> list[str]:
    """Add held-out answers while they fit, the most important first; returns the names of the added evaluations."""
    for number in range(len(names[:MAX_EVALUATIONS])):
        answers = run.answers(number)
        if not room.takes(len(json.dumps(answers))):
            return list(names[:number])
        data.add(f"answers/{place}/{number}", answers)
        names_of = (part["name"] for row in answers["rows"] for message in row["messages"] for part in message["parts"])
        _add_images(data, place, run, names_of, room)
    return list(names[:MAX_EVALUATIONS])


def _add_steps(data: PageData, place: int, run: ViewedRun, steps: Sequence[int], room: _Room) -> list[int]:
    """Add evenly spaced recorded steps while they fit; returns the added steps."""
    kept = list[int]()
    for step in _coarse_to_fine(_evenly(steps, MAX_STEPS)):
        try:
            records = tuple(
                replace(each, answers=each.answers[:MAX_ANSWERS]) for each in run.records(step)[:MAX_GROUPS]
            )
        except (FileNotFoundError, DataError):
            continue  # `fovea view` reports the error when this step is opened
        value = json.dumps(step_json(step, records), allow_nan=False)
        if not room.takes(len(value)):
            break
        data.values[f"step/{place}/{step}"] = value
        _add_images(data, place, run, _images_of(records), room)
        kept.append(step)
    return sorted(kept)


def _evenly(steps: Sequence[int], number: int) -> list[int]:
    """At most `number` of the steps, evenly spaced, with the first and the last."""
    if len(steps) <= number:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (number - 1))] for place in range(number)]


def _coarse_to_fine(steps: Sequence[int]) -> list[int]:
    """Reorder the steps so that every prefix of the list is spread over the whole run; the last step comes first."""
    return list(dict.fromkeys([*steps[-1:], *(step for stride in (32, 16, 8, 4, 2, 1) for step in steps[::stride])]))


def _images_of(records: Sequence[AnsweredRow]) -> Iterator[str]:
    """Names of the prompts' images, then of the images that the environment added."""
    yield from (image.name for record in records for image in record.images)
    turns = (turn for record in records for answer in record.answers for turn in answer.turns)
    yield from (image.name for turn in turns for image in turn.images)


def _add_images(data: PageData, place: int, run: ViewedRun, names: Iterable[str], room: _Room) -> None:
    """Add the images that fit; for the others the page says that the file does not hold them."""
    for name in dict.fromkeys(names):
        path = f"{place}/{name}"
        png = None if path in data.images else read_image(run.folder, name)
        if png is not None and room.takes(len(png) * 4 // 3):
            data.images[path] = png
