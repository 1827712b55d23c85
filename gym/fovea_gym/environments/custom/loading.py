"""Imports the user's code, `path/to/file.py:name`, and checks it before the run begins.

Importing runs the top level of the file. Its own imports are found as if Python had been started with the file.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import itertools
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from fovea_gym.environments.base import defines
from fovea_gym.environments.custom.signatures import (
    OWN_NAMES,
    RewardFunction,
    called_by_name,
    called_by_own_names,
    check_places,
    check_required,
)
from fovea_gym.errors import ConfigError, FoveaError, describe_error, result_or_error
from fovea_gym.settings.base import file_meant
from fovea_gym.settings.environments import OwnEnvironment
from fovea_gym.settings.rewards import FROM_PYTHON
from fovea_gym.types import AnswerEnd

OWN_PACKAGE = __name__.partition(".")[0]
TASK, TURNS = ("task",), ("task", "turns")
METHODS: Mapping[str, tuple[str, ...]] = {"tasks": ("split",), "prompt": TASK, "score": TURNS, "target": TASK}
"""The required methods of an environment, with the arguments that each is called with."""
MORE_METHODS: Mapping[str, tuple[str, ...]] = {
    **{"reply": TURNS, "open": ("task", "seed"), "demonstration": TASK, "tools": TASK},
    "at": ("stage",),
}
"""The optional methods, for environments with several turns, sessions, tools or stages."""


def load_reward(spec: str) -> RewardFunction:
    """The function that the setting `reward` names; ConfigError if there is none that can be called."""
    return checked_reward(load_named(spec, "reward"), spec)


def checked_reward(function: object, name: str) -> RewardFunction:
    """Check a reward function, and wrap one with another trainer's signature; ConfigError if it cannot be called."""
    if not callable(function):
        raise ConfigError(f"reward={name} is {type(function).__name__}, not a function; name one")
    if (published := called_by_name(function, name)) is not None:
        return published
    check_required(function, OWN_NAMES, name)
    if (named := called_by_own_names(function)) is not None:
        return named
    _check_call(function, ("task", "text", "images"), "reward", name)
    check_places(function, name)
    return function


def load_environment(settings: OwnEnvironment, section: str = "") -> Any:
    """An instance of the class that `settings.file` names; ConfigError if it is not a class or lacks a method.

    Errors name `section` as the setting, with the file as its value.
    """
    spec, setting = settings.file, section.removesuffix(".")
    made = load_named(spec, setting)
    if not isinstance(made, type):
        named = _setting_of(spec, setting)
        raise ConfigError(f"{named} is not a class; name one with the methods {', '.join(METHODS)}")
    return checked_environment(_instance(made, settings, section), spec, setting)


def checked_environment(user: Any, name: str, setting: str = "") -> Any:
    """Return the user's object if it has the methods of an environment; ConfigError if it lacks one.

    `setting`, if any, is the setting that errors name, with `name` as its value.
    """
    named = _setting_of(name, setting)
    needed = METHODS.keys() | ({"at"} if defines(user, "stages") else set())
    # its graders or its sessions may score instead
    needed -= {"score"} if hasattr(user, "graders") or defines(user, "open") else set()
    for method, parameters in {**METHODS, **MORE_METHODS}.items():
        bound = getattr(user, method, None)
        if bound is None and method not in needed:
            continue
        if not callable(bound):
            raise ConfigError(f"{named} has no method {method}; add {method}({', '.join(parameters)})")
        _check_call(bound, parameters, setting, f"{name}.{method}")
    _check_turns(user, named)
    if not isinstance(end := getattr(user, "answer_end", None), AnswerEnd | None):
        raise ConfigError(
            f"{named} has answer_end={end!r}; set fovea_gym.types.AnswerEnd(), for a box, or another one, "
            'such as AnswerEnd(closing="</answer>")'
        )
    if defines(user, "stages") and not defines(user, "default_starts"):
        raise ConfigError(
            f"{named} has stages, but no default_starts; add the steps at which the second and later ones "
            "begin, such as default_starts = (100, 300)"
        )
    return user


def _check_turns(user: Any, named: str) -> None:
    """Raise ConfigError if an environment replies without a limit of turns, or has a limit but never replies."""
    max_turns = getattr(user, "max_turns", None)
    for method in ("reply", "open"):
        if hasattr(user, method) and max_turns is None:
            fix = "add max_turns = 4, or another bound"
            raise ConfigError(f"{named} has a method {method}, but no max_turns; {fix}")
    if max_turns is not None and (not isinstance(max_turns, int) or max_turns < 1):
        raise ConfigError(f"{named} has max_turns={max_turns!r}; set a whole number of at least 1")
    if max_turns is not None and max_turns > 1 and not any(defines(user, each) for each in ("reply", "open", "tools")):
        fix = "add reply(task, turns), or leave max_turns out"
        raise ConfigError(f"{named} has max_turns={max_turns}, but no reply, open or tools; {fix}")


def _instance(made: type, settings: OwnEnvironment, section: str) -> object:
    takes_settings = "settings" in inspect.signature(made).parameters
    if settings.settings and not takes_settings:
        raise ConfigError(
            f"{section}settings is set, but {settings.file} takes none; write def __init__(self, settings), or "
            f"drop {section}settings"
        )
    instance, error = result_or_error(lambda: made(settings=dict(settings.settings)) if takes_settings else made())
    if isinstance(error, FoveaError):
        raise error
    if error is not None:
        named = _setting_of(settings.file, section.removesuffix("."))
        raise ConfigError(f"{named} cannot be made: it {describe_error(error)}; fix it")
    return instance


def _setting_of(name: str, setting: str) -> str:
    """The name as the value of its setting, `environment=mine.py:Own`; only the name if there is no setting."""
    return f"{setting}={name}" if setting else name


def load_named(spec: str, setting: str = "") -> object:
    """The object that `path/to/file.py:name` names; ConfigError if the file cannot be imported or lacks it."""
    path, name = check_named(spec, setting)
    module, error = result_or_error(lambda: import_file(path))
    if error is not None:
        named = f"{setting}: {path}" if setting else path
        raise ConfigError(f"{named} cannot be imported: it {describe_error(error)}; fix it") from error
    assert isinstance(module, ModuleType), path
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1)
        public = [each for each, value in vars(module).items() if not each.startswith("_") and callable(value)]
        others = ", ".join(public) or "it defines none"
        meant = f"did you mean {near[0]}?" if near else f"define it, or name another: {others}"
        raise ConfigError(f"{_setting_of(spec, setting)}: {path} has no {name}; {meant}")
    return getattr(module, name)


def check_named(spec: str, setting: str) -> tuple[Path, str]:
    """The file and the name in `path/to/file.py:name`; ConfigError for another form or a missing file."""
    if spec.startswith(FROM_PYTHON):
        raise ConfigError(_is_from_python(spec, setting))
    file, _, name = spec.rpartition(":")
    named = _setting_of(spec, setting)
    if not file.endswith(".py") or not name.isidentifier():
        fix = file_meant(spec) or "path/to/file.py:name"
        raise ConfigError(f"{named} does not name a file and an object in it; write {fix}")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"{named}: there is no file {path} in {Path.cwd()}; fix the path")
    return path, name


def _is_from_python(spec: str, setting: str) -> str:
    """The error text for a setting that names an object of a Python program, if no object was passed."""
    made_in_place = " (a lambda or a local name has to become a def or class at the top of one)"
    return (
        f"{setting}={spec} is an object that was passed from Python code, not the name of a file; pass it again "
        f"from Python: to resume with fovea.GRPO(recipe='RUN/config.yaml', {setting}=..., resume='auto') or fovea.PPO, "
        f"to evaluate with fovea.evaluate('RUN', {setting}=...); for `fovea eval` and new runs name the same code in a "
        f"file, {setting}=path/to/file.py:name{made_in_place if '<' in spec else ''}"
    )


def name_of(given: object) -> str:
    """The name `python:module.name` of an object passed from Python code: that of a function, or of its class."""
    while isinstance(given, partial):
        given = given.func
    named = given if hasattr(given, "__qualname__") else type(given)
    return f"{FROM_PYTHON}{named.__module__}.{named.__qualname__}"


def _check_call(function: Callable[..., object], parameters: Sequence[str], setting: str, shown: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind(*parameters)
    except TypeError:
        name, listed = shown.rpartition(":")[2], ", ".join(parameters)
        last = name.rpartition(".")[2]
        fix = f"lambda {listed}: ..." if last == "<lambda>" else f"def {last}({listed})"
        named = f"{setting}: {shown}" if setting else shown
        raise ConfigError(f"{named} takes {signature}, but is called as {name}({listed}); write {fix}") from None


def import_file(path: Path) -> ModuleType:
    """Run a file as a separate module, again with each call; raises whatever the file raises."""
    name = f"fovea_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"{path} ends in .py"
    assert spec.loader is not None, f"{path} ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    with _modules_beside(path.resolve().parent):
        spec.loader.exec_module(module)
    return module


def imported_files(path: Path) -> list[Path]:
    """Files that a file's source imports from its folder or the working directory, directly or indirectly."""
    found, unread = set[Path](), [path.resolve()]
    while unread:
        file = unread.pop()
        new = {each.resolve() for each in _candidates(file, path.resolve().parent) if each.is_file()} - found
        found |= new
        unread += [each for each in new if each.suffix == ".py"]
    return sorted(found - {path.resolve()})


def _candidates(file: Path, beside: Path) -> Iterator[Path]:
    """Possible paths of the modules that a file imports, and of their packages."""
    for level, name in _imported_names(file):
        roots = file.parents[level - 1 : level] if level else (beside, Path.cwd())
        parts = name.split(".")
        for root, number in itertools.product(roots, range(1, len(parts) + 1)):
            if parts[0] != OWN_PACKAGE:
                module = root.joinpath(*parts[:number])
                yield from (module.with_name(f"{module.name}.py"), module / "__init__.py")


def _imported_names(file: Path) -> Iterator[tuple[int, str]]:
    """Number of leading dots and dotted name of each import in a file; nothing for a file that is not valid Python."""
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                yield from ((0, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                # a name that is imported from a package may be one of its modules
                yield from ((node.level, f"{node.module or ''}.{alias.name}".strip(".")) for alias in node.names)


@contextmanager
def _modules_beside(folder: Path) -> Iterator[None]:
    """Within the block, search modules first in a folder, then in the working directory, then as before.

    Afterwards both folders are searched last, for imports inside functions, so that their files do not shadow installed
    packages that are imported later.
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
        # restore the earlier modules for the code that imported them; the file keeps references to its own
        names = {name.partition(".")[0] for name in others}
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[name]
        sys.modules.update(others)


def _modules_of_other_folders(folder: Path) -> dict[str, ModuleType]:
    """Loaded modules from elsewhere that a file in this folder would import instead of its neighbours of that name."""
    beside = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    names = {
        name
        for name in beside & sys.modules.keys() - sys.stdlib_module_names - {OWN_PACKAGE}
        if _is_from_elsewhere(sys.modules[name], folder)
    }
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}


def _is_from_elsewhere(module: ModuleType, folder: Path) -> bool:
    """True if a module was loaded from another folder and is not part of an installed package."""
    file = getattr(module, "__file__", None)
    known = (folder, *(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")))
    return file is not None and not any(Path(file).resolve().is_relative_to(each.resolve()) for each in known)
