"""Rules of the tree: how tests reach what they test, short files and functions, plain English; and tables of tests."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest

from gym_tests.tables import table
from tests.runs import ROOT, run_program

PACKAGES = {"fovea": ROOT, "fovea_gym": ROOT / "gym", "fovea_tools": ROOT / "tools"}
FOLDERS = {**PACKAGES, "tests": ROOT, "gym_tests": ROOT / "gym"}
LOOKED_AT = ast.Import | ast.ImportFrom | ast.Attribute | ast.Call | ast.Constant
Imported = tuple[int, str, str]
"""Line, local name and dotted origin."""


def faults(code: str) -> set[str]:
    """Faults of a module's code, each with its line."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, LOOKED_AT)]
    imports = list(imports_of(nodes))
    origins = {name: origin for _, name, origin in imports}
    return {*faults_of_imports(imports), *faults_of_paths(nodes, origins), *faults_of_scripts(nodes)}


def imports_of(nodes: Iterable[ast.AST]) -> Iterator[Imported]:
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                origin = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
                yield node.lineno, alias.asname or alias.name.partition(".")[0], origin


def faults_of_imports(imports: Iterable[Imported]) -> Iterator[str]:
    for line, _, origin in imports:
        package, *parts = origin.split(".")
        if package in ("tests", "gym_tests") and any(part.startswith("test_") for part in parts):
            yield f"{line}: {origin} is in a test module; move it to a module of helpers"
        if package in PACKAGES and any(map(is_private, parts)):
            yield f"{line}: {origin} is private; test a public function, or make it one"


def faults_of_paths(nodes: Iterable[ast.AST], origins: dict[str, str]) -> Iterator[str]:
    for node in nodes:
        path, patched = attributes_of(node)
        origin = origins.get(path[0], path[0])
        if path[0] in origins and not is_ours(origin):
            continue  # private names of other packages are not ours to change
        name, of_module = ".".join(path), is_module(origin)
        while len(path) > 1 and is_module(origin := f"{origin}.{path[1]}"):
            path = path[1:]
        private = sum(map(is_private, path[1:]))
        if is_private(path[-1]) and (private > 1 or (of_module and len(path) == 2)):
            yield f"{node.lineno}: {name} is too private; make what tests need public"
        if patched and len(path) > (3 if private else 4):
            yield f"{node.lineno}: {name} is patched too deep; patch a class, or test by behaviour"


def attributes_of(node: ast.AST) -> tuple[list[str], bool]:
    """The name and the attributes on the way to an attribute, and whether it is patched."""
    match node:
        case ast.Call(func=ast.Attribute(attr="setattr" | "delattr"), args=[owner, *more]):
            match owner, more:
                case ast.Constant(value=str(path)), _:
                    return path.split("."), True
                case _, [ast.Constant(value=str(last)), *_]:
                    return [*path_of(owner), last], True
        case ast.Attribute(ctx=context):
            return path_of(node), not isinstance(context, ast.Load)
    return [""], False


def path_of(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=owner, attr=name):
            return [*path_of(owner), name]
        case ast.Call(func=ast.Name(id="cast"), args=[_, value]):
            return path_of(value)
        case ast.Subscript(value=value) | ast.Call(func=value):
            return path_of(value)
    return [""]


def faults_of_scripts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import " in node.value:
            try:
                found = faults(node.value)
            except SyntaxError:
                continue
            yield from (f"{node.lineno}, in a script, {fault}" for fault in found)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_ours(origin: str) -> bool:
    return origin.partition(".")[0] in FOLDERS


@cache
def is_module(origin: str) -> bool:
    if not is_ours(origin):
        return False
    path = FOLDERS[origin.partition(".")[0]] / origin.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_tests_reach_what_they_test_by_public_names() -> None:
    files = sorted(file for folder in ("tests", "gym/gym_tests") for file in (ROOT / folder).glob("**/*.py"))
    found = [f"{file.relative_to(ROOT)}:{fault}" for file in files for fault in sorted(faults(file.read_text("utf-8")))]
    assert found == []


EXAMPLES = """
1: from tests.train.test_ppo import scored
1: from tests.train import test_ppo
1: SCRIPT = "from tests.train.test_ppo import scored"
1: from fovea_gym.rows.rows import _hub
0: from fovea import __version__
1: from fovea_gym.rows import rows; rows._hub()
1: monkeypatch.setattr("fovea_gym.rows.rows._hub", None)
0: policy._optimizer.adamw.step()
1: policy._optimizer._adamw.step()
1: cast(Any, engines[1]._line)._pid
1: monkeypatch.setattr(policy._optimizer, "_adamw", None)
0: import torch; torch._dynamo._config
0: policy._limit.max_tokens = 3
1: policy._backward.activations.largest = 3
1: run.policy.worker.annotator.policy.logprobs = None
"""
"""Numbers of faults, and lines with so many."""


def test_faults_are_found() -> None:
    examples = [line.split(": ", 1) for line in EXAMPLES.strip().splitlines()]
    assert [code for number, code in examples if len(faults(code)) != int(number)] == []


def test_every_row_that_fails_is_listed_with_what_was_found() -> None:
    @table(("number", "square"), [(2, 4), (3, 8), ("5", 25), (4, None)])
    def squares(number: int, square: int | None) -> None:
        if square is None:
            with pytest.raises(ValueError, match="not reached"):
                return
        found = number * number
        assert found == square, f"found {found}"

    with pytest.raises(AssertionError) as caught:
        squares()
    first, *rows = str(caught.value).splitlines()
    assert first == "3 of 4 rows fail:"
    starts = ("(3, 8): AssertionError: found 9", "('5', 25): TypeError: ", "(4, None): Failed: DID NOT RAISE")
    assert all(any(line.startswith(start) for line in rows) for start in starts)


def test_tables_are_crossed_take_fixtures_and_have_rows() -> None:
    with pytest.raises(AssertionError, match="without rows"):
        table("x", [])
    seen = []

    @pytest.mark.slow
    @table("x", [1, 2])
    @table("y", [3, 4])
    def crossed(x: int, y: int, factor: int) -> None:
        seen.append((factor, x, y))

    assert (list(inspect.signature(crossed).parameters), crossed.pytestmark[0].name) == (["factor"], "slow")
    crossed(factor=10)
    assert seen == [(10, 1, 3), (10, 1, 4), (10, 2, 3), (10, 2, 4)]


FOLDERS_OF_CODE = ("fovea", "gym", "tools", "tests", "benchmarks")
FILES = sorted(path for folder in FOLDERS_OF_CODE for path in (ROOT / folder).rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 70


def test_files_and_functions_are_short() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
    assert texts
    assert [name for name, text in texts.items() if len(text.splitlines()) > MAX_FILE_LINES] == []
    functions = [
        (f"{name}:{node.lineno} {node.name}", (node.end_lineno or 0) - node.lineno + 1)
        for name, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [each for each in functions if each[1] > MAX_FUNCTION_LINES] == []


def check(path: Path, text: str) -> tuple[int, str]:
    """The exit code of the check of plain English, and what it prints."""
    path.write_text(text, encoding="utf-8")
    done = run_program([sys.executable, ROOT / ".ci/english.py", path])
    return done.returncode, done.stdout


FAULTY = [
    '"""What holds connections."""',
    '"""Whether a path is a URL."""',
    '"""So that a rollout has the memory."""',
    '"""Rows. Those of this process come first."""',
    "# an engine with weights of its own reads them",
    "# it reads text alone",
    "x = f'{x} is no number; write one'",
    "# the engine is told of it",
]
SOUND = [
    '"""True if a path is a URL."""',
    "# each rank sends the log-probs of its own rows",
    "# there is no reference model, and it is no longer needed; a folder that is there is left alone",
    "x = 'types are told apart by their names'",
    "whether_of_its_own = alone = 1",
]


def test_every_faulty_construction_is_found_with_its_line_and_other_sentences_are_not(tmp_path: Path) -> None:
    lines = [line for pair in zip_longest(FAULTY, SOUND, fillvalue="x = 1") for line in pair]
    code, found = check(tmp_path / "module.py", "\n".join(lines))
    assert sorted(map(int, re.findall(r"module\.py:(\d+): ", found))) == list(range(1, 2 * len(FAULTY), 2))
    assert (code, *check(tmp_path / "module.py", "\n".join(SOUND))) == (1, 0, "")
    code, found = check(tmp_path / "page.md", "# Title\n\nIt reads text alone.\n")  # a page is read by lines
    assert code == 1
    assert "page.md:3: 'alone' (only, by itself)" in found
