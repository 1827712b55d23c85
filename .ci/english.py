"""Finds constructions that read like a translation, in docstrings, comments, help texts, errors and documents.

    python3 .ci/english.py [FILE...]     prints each construction with its place; exit code 1 if there is any

CONTRIBUTING.md lists what to write instead. This script uses only the standard library.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**/*.md",
    *(f"{folder}/**/*.py" for folder in ("fovea", "gym/fovea_gym", "tools/fovea_tools", "benchmarks", "examples")),
    "gym/*.md",
    "tools/*.md",
)
BEHIND_OWN = "under|by|in|on|that|which|for|and|or|with|is|are|was|has|have|to|of|from|than|at|while|reads|takes|holds"
PHRASES = {
    rf"\bof (?:its|their|his|one's|your|our) own(?=[,.;:)]|$| (?:{BEHIND_OWN})\b)": "separate, or its own X",
    r"(?<!let )(?<!left )(?<!leave )(?<!stands )(?<![-`])\balone\b": "only, by itself",
    r"(?<!here )\b(?:is|are) no (?!longer\b|more\b|less\b|fewer\b|other\b|\d)[a-z]": "is not a, has no",
    r"\b(?:is|are|was|were|be) (?:told|said)\b(?! apart)": "prints, warns, reports",
    r"(?:^|\. )Those (?:of|that|with|which)\b": "name the noun",
    r"\bthat which\b": "name the noun",
}
"""Patterns, each with what to write instead."""
FIRST_WORDS = re.compile(r"(?:What|Whether|Where|That|Those|So that)\b")


def texts_of(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield line number, text, and True for a docstring: strings and comments of Python files, lines of others."""
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from ((number, line, False) for number, line in enumerate(content.splitlines(), 1))
        return
    tree = ast.parse(content)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value, id(node) in docstrings
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def findings(path: Path) -> Iterator[str]:
    """Yield a line of output for each construction found in a file."""
    for number, text, is_docstring in texts_of(path):
        flat = " ".join(text.split())
        for phrase, better in PHRASES.items():
            for found in re.finditer(phrase, flat):
                around = flat[max(0, found.start() - 40) : found.end() + 30]
                yield f"{path}:{number}: '{found[0].strip()}' ({better}) in: {around}"
        if is_docstring and FIRST_WORDS.match(flat):
            yield f"{path}:{number}: begins with '{flat.split()[0]}' (what does it do, return or hold?): {flat[:80]}"


def main(arguments: Sequence[str]) -> int:
    """Print the findings in the given files, or in all files; returns the exit code."""
    files = [Path(name) for name in arguments] or [path for pattern in FILES for path in sorted(ROOT.glob(pattern))]
    found = [line for path in files for line in findings(path)]
    for line in found:
        print(line)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
