"""Files and functions stay small enough to read at a sitting. There is no list of exceptions."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [
    path
    for folder in ("fovea", "gym", "tools", "tests", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": lines
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}
