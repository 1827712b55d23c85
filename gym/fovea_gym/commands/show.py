"""`show`: rows of an environment as a page of HTML, with pictures, prompts and gold answers.

Rows are a stranger's text: everything is escaped and cut, and the page runs no script and loads nothing.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from html import escape

from fovea_gym.environments.base import Environment, Split
from fovea_gym.errors import DataError
from fovea_gym.rows.images import OpenImage
from fovea_gym.types import ImageRef, Message, Task
from fovea_gym.utils.shown_text import printable

MAX_ROWS = 200
MAX_CHARS = 4000
"""Characters of one text."""
MAX_PARTS = 40
"""Texts and pictures of one prompt."""
SIDE_PX = 384
"""Longest side of a picture."""
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2em; background: #f6f6f4; color: #222; }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(22em, 1fr)); gap: 1em; }}
article {{ background: #fff; border: 1px solid #ddd; border-radius: 6px; padding: 1em; overflow: auto; }}
h2 {{ font-size: 1em; margin: 0 0 .6em; color: #666; }}
img {{ max-width: 100%; image-rendering: pixelated; border: 1px solid #eee; }}
p, pre {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: .4em 0; font: inherit; }}
.role {{ color: #666; font-size: .85em; }}
.gold {{ border-left: 3px solid #2a7; padding-left: .6em; }}
.bad {{ border-left: 3px solid #c33; padding-left: .6em; }}
</style>
<h1>{title}</h1>
<p>{note}</p>
<main>
{rows}
</main>
</html>
"""


def page_of(environment: Environment, title: str, split: Split, rows: int, open_image: OpenImage) -> str:
    """The page of the first rows of a split; a row that cannot be read is shown with the reason."""
    tasks = environment.tasks(split)
    shown = min(rows, len(tasks), MAX_ROWS)
    articles = "\n".join(_article(environment, tasks, index, open_image) for index in range(shown))
    note = f"{shown:,} of {len(tasks):,} rows of the split {split}"
    return _PAGE.format(title=_text(title), note=_text(note), rows=articles)


def _article(environment: Environment, tasks: Sequence[Task], index: int, open_image: OpenImage) -> str:
    try:
        task = tasks[index]
        prompt = "\n".join(_parts(environment.prompt(task), open_image))
        answers = environment.demonstration(task)
    except DataError as error:
        return f'<article><h2>row {index}</h2><p class="bad">{_text(str(error))}</p></article>'
    name = task.id if task.kind == "all" else f"{task.id}, {task.kind}"
    # of an episode with several turns the whole of it
    full_marks = "".join(f'<p class="gold">{_text(answer)}</p>' for answer in answers[:MAX_PARTS])
    gold = f'<p class="role">gold: {_text(task.answer)}</p><p class="role">full marks:</p>{full_marks}'
    return f"<article><h2>{_text(name)}</h2>\n{prompt}\n{gold}</article>"


def _parts(messages: Sequence[Message], open_image: OpenImage) -> Iterator[str]:
    """The texts and pictures of a prompt, each below the role of its message where that is not the user's."""
    parts = [(message.role, part) for message in messages for part in message.parts]
    for role, part in parts[:MAX_PARTS]:
        label = "" if role == "user" else f'<p class="role">{role}</p>'
        yield label + (_picture(part, open_image) if isinstance(part, ImageRef) else f"<p>{_text(part)}</p>")
    if len(parts) > MAX_PARTS:
        yield f'<p class="role">and {len(parts) - MAX_PARTS:,} more parts</p>'


def _picture(ref: ImageRef, open_image: OpenImage) -> str:
    image = open_image(ref).convert("RGB")
    size = "x".join(map(str, image.size))
    image.thumbnail((SIDE_PX, SIDE_PX))
    written = io.BytesIO()
    image.save(written, "PNG")
    content = base64.b64encode(written.getvalue()).decode()
    return f'<img src="data:image/png;base64,{content}" alt="{_text(ref.where)}" title="{size}">'


def _text(text: str) -> str:
    """A text as HTML: cut, escaped, and without characters that turn or hide what follows."""
    rest = len(text) - MAX_CHARS
    whole = text if rest <= 0 else f"{text[:MAX_CHARS]} ... and {rest:,} more characters"
    return escape(printable(whole.encode("utf-8", "replace").decode()))
