"""Checks that a release of a package has the names and keyword arguments that Fovea uses, without installing it.

    pip download --no-deps vllm==0.33.0 -d /tmp/wheels
    python -m benchmarks.names vllm /tmp/wheels/vllm-0.33.0-*.whl

The folder of an installed package works too. Prints the missing names; the exit code is 1 if there are any.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

FOVEA = Path(__file__).parents[1] / "fovea"


Source = Path | zipfile.Path
"""The folder that contains a package, or a wheel."""


@dataclass(frozen=True, slots=True)
class Use:
    """A name that a file of Fovea imports, and the keyword arguments with which the file calls it."""

    module: str
    name: str
    keywords: frozenset[str]
    file: str


def uses_of(package: str, folder: Path = FOVEA) -> Iterator[Use]:
    """Yield the names that the files below a folder import from a package."""
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
                for alias in node.names:
                    keywords = frozenset(_keywords(tree, alias.asname or alias.name))
                    yield Use(node.module or "", alias.name, keywords, str(path.relative_to(folder)))


def _keywords(tree: ast.AST, name: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)


def missing(use: Use, source: Source) -> str | None:
    """Describe what a release lacks for this use; None if it has the name and all keyword arguments."""
    module = use.module.replace(".", "/")
    if _files(source, f"{module}/{use.name}"):
        return None
    files = _files(source, module)
    if not files:
        return f"no module {use.module}"
    found = _definition(files[0].read_text(encoding="utf-8"), use.name)
    if found is None:
        return f"no name {use.name} in {use.module}"
    known = _arguments(found)
    unknown = set() if known is None else use.keywords - known
    return f"{use.module}.{use.name} takes no {', '.join(sorted(unknown))}" if unknown else None


def _files(source: Source, module: str) -> list[Source]:
    """The file of a module or package, in a list that is empty if there is none."""
    return [file for end in (".py", "/__init__.py") if (file := source / f"{module}{end}").is_file()]


@lru_cache
def _definition(text: str, name: str) -> ast.AST | None:
    """Find where a module defines, assigns, imports or mentions a name, tried in this order."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return node
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return node
        if isinstance(node, ast.alias) and (node.asname or node.name) == name:
            return node
        if isinstance(node, ast.Constant) and node.value == name:  # a lazy import by name
            return node
    return None


def _arguments(found: ast.AST) -> set[str] | None:
    """The keyword arguments that a function or class accepts; None if its source does not show them."""
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        given = found.args
        return None if given.kwarg else {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    if not isinstance(found, ast.ClassDef) or found.bases:
        return None
    makers = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    if makers:
        return _arguments(makers[0])
    if [ast.unparse(each).partition("(")[0] for each in found.decorator_list] != ["dataclass"]:
        return None  # other decorators may add arguments
    return {
        each.target.id for each in found.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def main(arguments: Sequence[str]) -> int:
    package, path = arguments[0], Path(arguments[1])
    source = zipfile.Path(path) if path.suffix == ".whl" else path
    uses = list(uses_of(package))
    lacking = [(use, said) for use in uses if (said := missing(use, source)) is not None]
    for use, said in lacking:
        print(f"{said}: {use.file}")
    print(f"{len(uses)} names of {package}, {len(lacking)} of them missing")
    return 1 if lacking or not uses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
