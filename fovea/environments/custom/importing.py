"""Imports of the user's files: what such a file imports is found as if python had been started with it.

All of it is in the process that trains or evaluates; workers and engines are sent tokens and weights, and no code.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

OWN_PACKAGE = __name__.partition(".")[0]


def import_file(path: Path) -> ModuleType:
    """Run a file as a module of its own, anew with each call; raises whatever the file does."""
    name = f"fovea_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"{path} ends in .py"
    assert spec.loader is not None, f"{path} ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # data classes look their module up there
    with _modules_beside(path.resolve().parent):
        spec.loader.exec_module(module)
    return module


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
        _put_back(others)


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
    """Whether a module is of a file in another folder, and of no installed package."""
    file = getattr(module, "__file__", None)
    known = (folder, *(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")))
    return file is not None and not any(Path(file).resolve().is_relative_to(each.resolve()) for each in known)


def _put_back(modules: Mapping[str, ModuleType]) -> None:
    """Let these be found under their names again, by the code that imported them; later ones live on in theirs."""
    names = {name.partition(".")[0] for name in modules}
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]
    sys.modules.update(modules)
