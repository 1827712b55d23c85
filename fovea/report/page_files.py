"""The files of the page: HTML, styles, and one script that is bundled from the ES modules in the package."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

STYLE, ICON = "style.css", "icon.svg"
MODULES = (
    "dom.js",
    "source.js",
    "address.js",
    "numbers.js",
    "chart.js",
    "axis.js",
    "curves.js",
    "tables.js",
    "overview.js",
    "heat.js",
    "marks.js",
    "groups.js",
    "list.js",
    "filters.js",
    "answer.js",
    "group.js",
    "samples.js",
    "heldout.js",
    "settings.js",
    "keys.js",
    "main.js",
)
"""The modules of the page, each after the modules that it imports."""
SCRIPT = "view.js"
"""All modules in one file: browsers request modules one after another, and load none from file:// addresses."""
PAGE_FILES = ("index.html", STYLE, ICON, SCRIPT)
_TYPES = {"html": "text/html", "css": "text/css", "svg": "image/svg+xml", "js": "text/javascript"}
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([a-z]+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const) (\w+))", re.MULTILINE)


@cache
def page_file(name: str) -> str:
    """The content of one of PAGE_FILES."""
    return _bundled() if name == SCRIPT else _shipped(name)


def media_type(name: str) -> str:
    """The media type of a file of the page."""
    return _TYPES[name.rpartition(".")[2]]


def _shipped(name: str) -> str:
    return (files("fovea.report") / "page" / name).read_text(encoding="utf-8")


def _bundled() -> str:
    """All modules as one plain script.

    Each module becomes a function that returns the module's exports. The last one exports nothing and uses `await`, so
    it becomes an async function.
    """
    *others, last = MODULES
    return "\n".join(('"use strict";', *map(_as_constant, others), f"(async () => {{\n{_body(last)}}})();\n"))


def _as_constant(module: str) -> str:
    exported = ", ".join(_EXPORT.findall(_shipped(module)))
    return f"const {_constant(module)} = (() => {{\n{_body(module)}return {{ {exported} }};\n}})();"


def _body(module: str) -> str:
    """The code of a module without `export`, with its imports turned into constants."""
    imported = _IMPORT.sub(lambda match: f"const {match[1]} = {_constant(match[2])};", _shipped(module))
    return _EXPORT.sub("", imported)


def _constant(module: str) -> str:
    return f"_{module.removesuffix('.js')}"
