"""The user's code, `path/to/file.py:name`: imported, which runs its top level, and checked before the run begins."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from fovea.config.environments import OwnEnvironment
from fovea.config.rewards import FROM_PYTHON
from fovea.environments.custom.importing import import_file
from fovea.environments.custom.trl import RewardFunction, called_as_by_trl, is_of_trl
from fovea.errors import ConfigError, FoveaError, describe_error, result_or_error
from fovea.types import AnswerEnd

TASK, TURNS = ("task",), ("task", "turns")
METHODS: Mapping[str, tuple[str, ...]] = {"tasks": ("split",), "prompt": TASK, "score": TURNS, "target": TASK}
"""The methods of an environment, with the arguments that each is called with."""
MORE_METHODS: Mapping[str, tuple[str, ...]] = {
    **{"reply": TURNS, "open": ("task", "seed"), "demonstration": TASK, "tools": TASK},
    "at": ("stage",),
}
"""The methods of environments of several turns, with or without sessions, and of several stages."""


def load_reward(spec: str) -> RewardFunction:
    """The function of `reward`; ConfigError where there is none that can be called."""
    return checked_reward(load_named(spec, "reward"), spec)


def checked_reward(function: object, name: str) -> RewardFunction:
    """The reward function, one of TRL's signature wrapped; ConfigError for what cannot be called as one."""
    if not callable(function):
        raise ConfigError(f"reward={name} is {type(function).__name__}, no function; name one")
    if is_of_trl(function):
        return called_as_by_trl(function, name)
    _check_call(function, ("task", "text", "images"), "reward", name)
    return function


def load_environment(settings: OwnEnvironment) -> Any:
    """An instance of the class of `environment`; ConfigError where it is none, or lacks a method."""
    spec = settings.file
    made = load_named(spec, "environment")
    if not isinstance(made, type):
        raise ConfigError(f"environment={spec} is not a class; name one with the methods {', '.join(METHODS)}")
    return checked_environment(_instance(made, settings), spec)


def checked_environment(user: Any, name: str) -> Any:
    """An object of the user's that has the methods of an environment; ConfigError where it lacks one."""
    needed = METHODS.keys() | ({"at"} if hasattr(user, "stages") else set())
    # its sessions may score
    needed -= {"score"} if hasattr(user, "open") else set()
    for method, parameters in {**METHODS, **MORE_METHODS}.items():
        bound = getattr(user, method, None)
        if bound is None and method not in needed:
            continue
        if not callable(bound):
            raise ConfigError(f"environment={name} has no method {method}; add {method}({', '.join(parameters)})")
        _check_call(bound, parameters, "environment", f"{name}.{method}")
    _check_turns(user, name)
    if not isinstance(end := getattr(user, "answer_end", None), AnswerEnd | None):
        raise ConfigError(
            f"environment={name} has answer_end={end!r}; set fovea.types.AnswerEnd(), for a box, or another one, "
            'such as AnswerEnd(closing="</answer>")'
        )
    if hasattr(user, "stages") and not hasattr(user, "default_starts"):
        raise ConfigError(
            f"environment={name} has stages, but no default_starts; add the steps at which the second and later ones "
            "begin, such as default_starts = (100, 300)"
        )
    return user


def _check_turns(user: Any, name: str) -> None:
    """An environment that replies says how often, and the reverse."""
    max_turns = getattr(user, "max_turns", None)
    for method in ("reply", "open"):
        if hasattr(user, method) and max_turns is None:
            fix = "add max_turns = 4, or another bound"
            raise ConfigError(f"environment={name} has a method {method}, but no max_turns; {fix}")
    if max_turns is not None and (not isinstance(max_turns, int) or max_turns < 1):
        raise ConfigError(f"environment={name} has max_turns={max_turns!r}; set a whole number from 1 on")


def _instance(made: type, settings: OwnEnvironment) -> object:
    takes_settings = "settings" in inspect.signature(made).parameters
    if settings.settings and not takes_settings:
        raise ConfigError(
            f"environment.settings is set, but {settings.file} takes none; write def __init__(self, settings), or "
            "drop environment.settings"
        )
    instance, error = result_or_error(lambda: made(settings=dict(settings.settings)) if takes_settings else made())
    if isinstance(error, FoveaError):
        raise error
    if error is not None:
        raise ConfigError(f"environment={settings.file} cannot be made: it {describe_error(error)}; fix it")
    return instance


def load_named(spec: str, setting: str) -> object:
    """The object that a file defines under a name."""
    path, name = check_named(spec, setting)
    module, error = result_or_error(lambda: import_file(path))
    if error is not None:
        raise ConfigError(f"{setting}: {path} cannot be imported: it {describe_error(error)}; fix it") from error
    assert isinstance(module, ModuleType), path
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1)
        public = [each for each, value in vars(module).items() if not each.startswith("_") and callable(value)]
        others = ", ".join(public) or "it defines none"
        meant = f"did you mean {near[0]}?" if near else f"define it, or name another: {others}"
        raise ConfigError(f"{setting}={spec}: {path} has no {name}; {meant}")
    return getattr(module, name)


def check_named(spec: str, setting: str) -> tuple[Path, str]:
    """The file and the name that `path/to/file.py:name` gives; ConfigError for another form, or where no file is."""
    if spec.startswith(FROM_PYTHON):
        raise ConfigError(_is_from_python(spec, setting))
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"{setting}={spec} does not name a file and something in it; write path/to/file.py:name")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"{setting}={spec}: there is no file {path} in {Path.cwd()}; fix the path")
    return path, name


def _is_from_python(spec: str, setting: str) -> str:
    """Advice for settings that name an object of a Python program when none was given."""
    made_in_place = " (a lambda or a local name has to become a def or class at the top of one)"
    return (
        f"{setting}={spec} is an object that Python code has given, and is in no file that is named; give it again "
        f"from Python, to resume with fovea.GRPO(recipe='RUN/config.yaml', {setting}=..., resume='auto') or fovea.PPO, "
        f"to evaluate with fovea.evaluate('RUN', {setting}=...); for `fovea eval` and new runs name the same code in a "
        f"file, {setting}=path/to/file.py:name{made_in_place if '<' in spec else ''}"
    )


def name_of(given: object) -> str:
    """The name of an object that Python code has given, `python:module.name`: of a function, or of its class."""
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
        raise ConfigError(
            f"{setting}: {shown} takes {signature}, but is called as {name}({listed}); write {fix}"
        ) from None
