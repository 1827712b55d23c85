"""Seeded small faults (mutants) of a source tree, all written into one copy of it and activated one at a time.

`a < b` becomes `(a <= b if _mutant_(17) else a < b)`: one tree and one import serve all mutants, and a run without an
active mutant shows which tests reach which mutants.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
SWITCH = "_mutant_"
COMPILED = ("jit", "compile", "kernel")
"""Parts of the names of decorators that compile a function from its source, which must not contain a switch."""

RUNTIME = f"""

def _install_switch() -> None:
    import builtins, os
    seen, folder = set(), os.environ.get("FOVEA_MUTANT_HITS")
    def switch(number):
        if folder is not None:
            key = (number, os.environ.get("PYTEST_CURRENT_TEST", ""))
            if key not in seen:
                seen.add(key)
                with open(f"{{folder}}/{{os.getpid()}}", "a", encoding="utf-8") as file:
                    file.write(f"{{number}}\\t{{key[1]}}\\n")
        return number == switch.active
    switch.active = int(os.environ.get("FOVEA_MUTANT", "-1"))
    builtins.{SWITCH} = switch

_install_switch()
"""
"""Code appended to the package's `__init__.py` in the copy: it activates a mutant, and records which are reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A change of one expression within a function."""

    file: str
    """Path of the file relative to the root of the tree."""
    function: str
    line: int
    start: int
    """Byte offset at which the expression begins."""
    end: int
    original: str
    mutated: str

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """A key of the mutant that stays the same if lines above it change."""
        return self.file, self.function, self.original, self.mutated


def mutants_of(root: Path, package: str) -> list[Mutant]:
    """Find all mutants of a package, in the order of files and lines."""
    found = []
    for path in sorted((root / package).rglob("*.py")):
        source = path.read_bytes()
        starts = list(accumulate(map(len, source.splitlines(keepends=True)), initial=0))
        for function, node, mutated in _sites(ast.parse(source), ""):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            place = {"line": node.lineno, "start": start, "end": end}
            file, texts = path.relative_to(root).as_posix(), (source[start:end].decode(), ast.unparse(mutated))
            found.append(Mutant(file=file, function=function, original=texts[0], mutated=texts[1], **place))
    return found


def drawn(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Choose `count` random mutants that do not overlap."""
    order = list(mutants)
    random.Random(seed).shuffle(order)
    taken: list[Mutant] = []
    for mutant in order:
        if len(taken) == count:
            break
        if not any(mutant.file == each.file and mutant.start < each.end and each.start < mutant.end for each in taken):
            taken.append(mutant)
    return sorted(taken, key=lambda each: (each.file, each.start))


def found_again(earlier: Sequence[Mutant], mutants: Sequence[Mutant]) -> list[Mutant | None]:
    """Find the earlier mutants in a tree whose lines have moved; None for a mutant whose code no longer exists."""
    places: dict[tuple[str, str, str, str], list[Mutant]] = {}
    for mutant in mutants:
        places.setdefault(mutant.identity, []).append(mutant)
    found: list[Mutant | None] = []
    for each in earlier:
        same = places.get(each.identity, [])
        found.append(min(same, key=lambda one: abs(one.line - each.line)) if same else None)
    return found


def write_switches(root: Path, package: str, mutants: Sequence[Mutant | None]) -> None:
    """Write the mutants into the tree, all inactive, and the code that activates them into this package."""
    by_file: dict[str, list[tuple[int, Mutant]]] = {}
    for number, mutant in enumerate(mutants):
        if mutant is not None:
            by_file.setdefault(mutant.file, []).append((number, mutant))
    for file, of_file in by_file.items():
        source = (root / file).read_bytes()
        for number, mutant in sorted(of_file, key=lambda each: -each[1].start):
            switched = f"({mutant.mutated} if {SWITCH}({number}) else {mutant.original})"
            source = source[: mutant.start] + switched.encode() + source[mutant.end :]
        ast.parse(source)
        (root / file).write_bytes(source)
    with (root / package / "__init__.py").open("a", encoding="utf-8") as init:
        init.write(RUNTIME)


def _sites(node: ast.AST, function: str) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """Yield the expressions below a node that may be mutated, each with its function and its mutation."""
    inside = bool(function)
    for child in _run_later(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not any(word in ast.unparse(each) for each in child.decorator_list for word in COMPILED):
                name = f"{function}.{child.name}" if function else child.name
                # the body of a class runs at import, before a mutant can be active
                within = name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or inside else ""
                yield from _sites(child, within)
            continue
        if inside and isinstance(child, ast.expr):
            yield from ((function, child, mutated) for mutated in _changed(child))
        if inside and isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
            yield function, child.value, ast.Constant(None)
        if inside and isinstance(child, ast.Return) and not isinstance(child.value, ast.Constant | None):
            yield function, child.value, ast.Constant(None)
        yield from _sites(child, function)


def _run_later(node: ast.AST) -> Iterator[ast.AST]:
    """The children of a node without annotations, defaults, decorators, patterns, f-strings and raised exceptions."""
    left_out: tuple[str, ...] = ("annotation", "returns", "args", "decorator_list", "pattern", "exc")
    if isinstance(node, ast.Call):
        left_out = ()
    for name, value in ast.iter_fields(node):
        if name in left_out:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield child


def _changed(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the mutations of an expression."""
    changed = copy.deepcopy(node)
    if isinstance(changed, ast.Compare) and type(changed.ops[0]) in COMPARED:
        changed.ops[0] = COMPARED[type(changed.ops[0])]()
        yield changed
    elif (
        isinstance(changed, ast.BinOp) and type(changed.op) in COMPUTED and not isinstance(changed.left, ast.JoinedStr)
    ):
        changed.op = COMPUTED[type(changed.op)]()
        yield changed
    elif isinstance(changed, ast.BoolOp):
        changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()
        yield changed
    elif isinstance(changed, ast.UnaryOp) and isinstance(changed.op, ast.Not):
        yield changed.operand
    elif isinstance(changed, ast.IfExp):
        yield changed.orelse
    elif isinstance(changed, ast.Constant) and isinstance(changed.value, bool):
        yield ast.Constant(not changed.value)
    elif isinstance(changed, ast.Constant) and isinstance(changed.value, int | float):
        yield ast.Constant(changed.value + 1)
