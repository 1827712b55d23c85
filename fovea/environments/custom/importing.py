"""Imports of the user's files: what such a file imports is found as if python had been started with it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

OWN_PACKAGE = __name__.partition(".")[0]


def import_file(path: Path) -> ModuleType:
    """Run a file as a separate module, anew with each call; raises whatever the file does."""
    name = f"fovea_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"{path} ends in .py"
    assert spec.loader is not None, f"{path} ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # data classes look their module up there
    with _modules_beside(path.resolve().parent):
        spec.loader.exec_module(module)
    return module


def imported_files(path: Path) -> list[Path]:
    """Files of the modules that a file imports from its folder or the working directory, by itself or by others.

    They are found in the text: an import within a function counts, a name that is computed does not.
    """
    found, unread = set[Path](), [path.resolve()]
    while unread:
        file = unread.pop()
        new = {each.resolve() for each in _candidates(file, path.resolve().parent) if each.is_file()} - found
        found |= new
        unread += [each for each in new if each.suffix == ".py"]
    return sorted(found - {path.resolve()})


def _candidates(file: Path, beside: Path) -> Iterator[Path]:
    """Paths that the modules which a file imports would have, those of their packages included."""
    for level, name in _imported_names(file):
        roots = file.parents[level - 1 : level] if level else (beside, Path.cwd())
        parts = name.split(".")
        for root, number in itertools.product(roots, range(1, len(parts) + 1)):
            if parts[0] != OWN_PACKAGE:
                module = root.joinpath(*parts[:number])
                yield from (module.with_name(f"{module.name}.py"), module / "__init__.py")


def _imported_names(file: Path) -> Iterator[tuple[int, str]]:
    """Number of leading dots and dotted name of each import in a file; none of a file that is not Python."""
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                yield from ((0, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                # what is imported from a package may be a module of it
                yield from ((node.level, f"{node.module or ''}.{alias.name}".strip(".")) for alias in node.names)


@contextmanager
def _modules_beside(folder: Path) -> Iterator[None]:
    """Search modules first in a folder, then in the working directory, then as before.

    Afterwards both are searched last, for imports within functions, so that no file there takes the place of an
    installed package that is yet to be imported.
    """
    folders = dict.fromkeys((str(folder), str(Path.cwd())))
    others = _modules_of_other_folders(folder)
    for name in others:
        del sys.modules[name]
    sys.path[:0] = folders
    importlib.invalidate_caches()  # a file may be newer than the listing of its folder
    try:
        yield
    finally:
        for each in folders:
            with suppress(ValueError):  # the file has removed it
                sys.path.remove(each)
        sys.path += [each for each in folders if each not in sys.path]
        # found under their names again by the code that imported them; later ones live on in theirs
        names = {name.partition(".")[0] for name in others}
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[name]
        sys.modules.update(others)


def _modules_of_other_folders(folder: Path) -> dict[str, ModuleType]:
    """Modules that a file in this folder would be given in place of those beside it: of one name, from elsewhere."""
    beside = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    names = {
        name
        for name in beside & sys.modules.keys() - sys.stdlib_module_names - {OWN_PACKAGE}
        if _is_from_elsewhere(sys.modules[name], folder)
    }
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}


def _is_from_elsewhere(module: ModuleType, folder: Path) -> bool:
    """True if a module is of a file in another folder, and of no installed package."""
    file = getattr(module, "__file__", None)
    known = (folder, *(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")))
    return file is not None and not any(Path(file).resolve().is_relative_to(each.resolve()) for each in known)
