"""The page of a run's maps: an HTML file without scripts, in the folder of their pictures."""

from __future__ import annotations

from html import escape
from pathlib import Path
from urllib.parse import quote

from fovea_gym.utils.files import write_atomically
from fovea_tools.saliency.maps import FOLDER, AnswerMap, read_maps

HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src 'self' file:; style-src 'unsafe-inline'">
<title>Where answers look</title>
<style>
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
article { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.5rem 0; }
img { width: 20rem; max-width: 100%; align-self: start; image-rendering: pixelated; }
div { flex: 1; min-width: 16rem; overflow-wrap: anywhere; white-space: pre-wrap; }
small { opacity: .7; }
</style></head>
<body><h1>Where answers look</h1>
<p>The brightness of a patch is the drop of the answer's log-prob when the patch is hidden, as a share of the largest
drop in that picture.</p>
"""


def write_page(run_dir: Path) -> Path:
    """Write the page of all maps of a run into their folder, and return its file."""
    path = run_dir / FOLDER / "index.html"
    parts = [_article(file, found) for file, found in read_maps(run_dir).items()]
    write_atomically(path, "".join((HEAD, *parts, "</body></html>\n")).encode("utf-8", "backslashreplace"))
    return path


def _article(file: Path, found: AnswerMap) -> str:
    """The HTML of a map: lit picture, question, answer and numbers, escaped because the texts may be a stranger's."""
    most = max(0.0, *(fall for falls_C in found.falls for fall in falls_C))
    figures = f"log-prob {found.logprob:.3g}, up to {most:.3g} lower with {found.patch_px} px hidden"
    where = f"{found.id}, picture {found.image}, {found.weights}"
    return (
        f'<article><img src="{escape(quote(file.with_suffix(".png").name))}" alt="lit picture"><div>'
        f"<small>{escape(where)}</small>\n{escape(found.question)}\n<b>{escape(found.answer)}</b>\n"
        f"<small>{escape(figures)}</small></div></article>\n"
    )
