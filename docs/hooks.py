"""MkDocs calls these: they make the pages that no file holds, and lead links out of docs/ to pages of the site.

On a code host a page links to a file of the repository by its relative path. The site has a page for each such file,
below source/; the start page is README.md.
"""

from __future__ import annotations

import ast
import html
import inspect
import json
import posixpath
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import fovea
from fovea.config.describe import Setting, describe
from fovea.config.run import Config
from fovea.metrics.names import metrics_page
from fovea_gym.settings.base import names_of
from fovea_tools.importer.docs import page as system_page
from fovea_tools.importer.elsewhere import systems

ROOT = Path(__file__).parents[1]
HOME = "README.md"
PROTOCOLS = {
    "Environments": "fovea_gym.environments.base",
    "Rollout engines": "fovea.rollout.base",
    "Training": "fovea.train.base",
    "Records": "fovea.types",
}
"""Modules whose public classes the page of protocols shows, by heading."""
MADE_OF = {
    "fovea/metrics/names.yaml": "reference/metrics.md",
    "tools/fovea_tools/importer/elsewhere.yaml": "reference/elsewhere.md",
}
"""Files that a page of the site shows in a better form: on the site, links to the file lead to the page."""
CODE_OR_LINK = re.compile(r"(?P<code>(?P<ticks>`+).*?(?P=ticks))|\]\((?P<target>[^)\s]+)\)", re.DOTALL)
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z]+:|#")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made: each by its path below docs/, its text as Markdown."""
    made = {
        "reference/settings.md": settings_page(),
        "reference/python.md": python_page(),
        "reference/protocols.md": protocols_page(),
        "reference/metrics.md": metrics_page(),
        "reference/elsewhere.md": elsewhere_page(),
        **{f"reference/from-{name}.md": system_page(system) for name, system in systems().items()},
        "decisions/index.md": decisions_page(),
        "index.md": (ROOT / HOME).read_text(encoding="utf-8"),
    }
    pages = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for path in sources({**pages, HOME: made["index.md"]}):
        made[source_page(path)] = source_text(path)
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page with its links to files of the repository turned into links to pages."""
    here = page.file.src_uri
    origin = origin_of(here)
    if origin is None:
        return markdown

    def led(target: str) -> str:
        path, hash_, anchor = target.partition("#")
        found = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(origin), path)))
        return posixpath.relpath(found, posixpath.dirname(here) or ".") + hash_ + anchor

    return with_links(markdown, led)


def with_links(markdown: str, led: Callable[[str], str]) -> str:
    """The text with the target of every relative link replaced; code is left as it is."""

    def replaced(found: re.Match[str]) -> str:
        target = found["target"]
        return found.group() if target is None or ELSEWHERE.match(target) else f"]({led(target)})"

    pieces, end = [], 0
    for fence in FENCED.finditer(markdown):
        pieces += [CODE_OR_LINK.sub(replaced, markdown[end : fence.start()]), fence.group()]
        end = fence.end()
    return "".join([*pieces, CODE_OR_LINK.sub(replaced, markdown[end:])])


def origin_of(page: str) -> str | None:
    """The file of the repository whose text a page has, on which its relative links depend; None for made ones."""
    if page == "index.md":
        return HOME
    if page.startswith("source/"):
        return page.removeprefix("source/") if page.endswith(".md") and page.count(".md") == 1 else None
    return None if page.startswith("reference/") else f"docs/{page}"


def site_path(path: str) -> str:
    """The page, below docs/, of a file or folder of the repository."""
    if path == HOME:
        return "index.md"
    if path.startswith("docs/"):
        return f"{path.removeprefix('docs/')}/index.md" if (ROOT / path).is_dir() else path.removeprefix("docs/")
    return MADE_OF.get(path) or source_page(path)


def source_page(path: str) -> str:
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def sources(pages: dict[str, str]) -> set[str]:
    """The files and folders outside docs/ that pages lead to, and those that these lead to if they are pages too."""
    found: set[str] = set()
    waiting = dict(pages)
    while waiting:
        origin, text = waiting.popitem()
        for path in linked_paths(origin, text):
            made = path == HOME or path in MADE_OF or path.startswith("docs/")
            if made or path in found or not (ROOT / path).exists():
                continue
            found.add(path)
            if path.endswith(".md"):
                waiting[path] = (ROOT / path).read_text(encoding="utf-8")
    return found


def linked_paths(origin: str, text: str) -> list[str]:
    paths: list[str] = []

    def noted(target: str) -> str:
        paths.append(posixpath.normpath(posixpath.join(posixpath.dirname(origin), target.partition("#")[0])))
        return target

    with_links(text, noted)
    return paths


def source_text(path: str) -> str:
    """The page of a file or folder of the repository."""
    file = ROOT / path
    if file.suffix == ".md":
        return file.read_text(encoding="utf-8")
    head = f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n"
    if file.is_dir():
        return head + "\n".join(f"* `{each.relative_to(ROOT)}`" for each in sorted(file.glob("*.*")))
    if file.suffix == ".ipynb":
        return head.replace("exclude: true", "exclude: false") + notebook_text(json.loads(file.read_text("utf-8")))
    language = {".py": "python", ".yaml": "yaml", ".toml": "toml"}.get(file.suffix, "text")
    return f"{head}``````{language}\n{file.read_text(encoding='utf-8')}``````\n"


def notebook_text(notebook: dict[str, list[dict[str, str | list[str]]]]) -> str:
    cells = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in notebook["cells"]]
    texts = (f"```python\n{text}\n```" if is_code else re.sub(r"^# ", "## ", text) for text, is_code in cells)
    return "\n\n".join(texts) + "\n"


def decisions_page() -> str:
    lines = [
        "# Decisions",
        "",
        "Choices between real alternatives: the question, the choice, what would change it.",
        "",
    ]
    for file in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        title = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"* [{title}]({file.name})")
    return "\n".join(lines)


def elsewhere_page() -> str:
    """The start page of the tables for users of other systems."""
    lines = [f"* [From {each.title}](from-{name}.md)" for name, each in systems().items()]
    return "\n".join(["# From another system", "", "Settings, commands and metrics side by side.", "", *lines])


def settings_page() -> str:
    """Every setting below a heading of its own, so that the search finds it by its name."""
    for name in names_of(Config.model_fields["environment"]):
        describe(f"environment={name}")  # imports the examples, whose settings are listed from now on
    by_section: dict[str, list[Setting]] = {}
    for each in describe():
        by_section.setdefault(each.key.partition(".")[0] if "." in each.key else "run", []).append(each)
    head = "---\nhide: [toc]\n---\n# Settings\n\nWhat `fovea config` prints, by section: "
    parts = [head + ", ".join(f"[{name}](#{name})" for name in by_section) + "."]
    for name, settings in by_section.items():
        parts += [f"## {name}", *(part for each in settings for part in setting_text(each))]
    return "\n\n".join(parts)


def setting_text(setting: Setting) -> Iterator[str]:
    changes = "; may change on resume" if setting.may_change else ""
    yield f"### `{setting.key}`"
    yield f"Default `{setting.default}` · {escaped(setting.type)}{changes}"
    yield escaped(setting.doc)


def escaped(text: str) -> str:
    """Plain text as Markdown that shows it as it is; what stands in backticks stays code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_\[\]])", r"\\\1", html.escape(part)) for part in parts
    )


def python_page() -> str:
    """The public names of `fovea`, whose signatures and docstrings mkdocstrings fills in."""
    module = ast.parse((ROOT / "fovea" / "api" / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in module.body if isinstance(node, ast.ImportFrom)]
    defined_in = {alias.name: node.module for node in imports for alias in node.names}
    names = [f"{defined_in[name]}.{name}" for name in fovea.__all__ if name in defined_in]
    head = "# Python\n\nThe names of `import fovea`; [From Python](../python.md) shows them in use."
    return "\n\n".join([head, *(f"::: {name}" for name in names)])


def protocols_page() -> str:
    """The protocols that code of one's own fits, and the records that go through them."""
    parts = ["# Protocols and records", "[Your own reward, your own environment](../own.md) shows the first in use."]
    for heading, module in PROTOCOLS.items():
        tree = ast.parse(inspect.getsource(import_module(module)))
        names = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        parts += [f"## {heading}", *(f"::: {module}.{name}\n    options: {{heading_level: 3}}" for name in names)]
    return "\n\n".join(parts)
