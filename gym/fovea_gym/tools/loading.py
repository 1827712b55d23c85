"""Loading of the tools that the setting `tools` names: built-in tools, and functions in files and modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pkgutil import resolve_name
from typing import Any

from fovea_gym.environments.custom.loading import load_named
from fovea_gym.errors import ConfigError, describe_error, result_or_error
from fovea_gym.settings.rewards import FROM_PYTHON
from fovea_gym.tools.base import Tool
from fovea_gym.tools.calculator import Calculator
from fovea_gym.tools.function import function_tool
from fovea_gym.tools.picture_tools import PICTURE_TOOLS
from fovea_gym.tools.python import PythonTool

PYTHON = "python"
BUILT_IN: Mapping[str, Tool] = {tool.name: tool for tool in PICTURE_TOOLS} | {Calculator.spec.name: Calculator()}
"""The built-in tools except Python, which has to be allowed."""


def load_tools(
    names: Sequence[str],
    *,
    allow_python: bool,
    allow_unconfined: bool = False,
    given: Sequence[object] = (),
    section: str = "",
) -> tuple[Tool, ...]:
    """The named tools, or the `given` objects of these names; ConfigError for an invalid or duplicate tool.

    `section` is the prefix of the settings in errors.
    """
    python = (lambda: PythonTool.checked(allow_unconfined=allow_unconfined, section=section)) if allow_python else None
    objects = given or [_named(name, section, python) for name in names]
    tools = tuple(_tool(each, name, section) for each, name in zip(objects, names, strict=True))
    found = dict[str, str]()
    for tool, shown in zip(tools, names, strict=True):
        if (name := tool.spec.name) in found:
            raise ConfigError(f"{section}tools: {found[name]} and {shown} are both called {name}; rename one")
        found[name] = shown
    return tools


def _tool(named: Any, shown: str, section: str) -> Tool:
    if isinstance(named, str):
        named = _named(named, section)
    if hasattr(named, "spec") and callable(getattr(named, "call", None)) and not isinstance(named, type):
        tool: Tool = named
        return tool
    return function_tool(named, f"{section}tools: {shown}")


def _named(name: str, section: str, make_python: Callable[[], Tool] | None = None) -> object:
    if name == PYTHON:
        if make_python is None:
            raise ConfigError(
                f"{section}tools names python, which runs programs that the model writes, each confined to an "
                f"empty folder; set {section}allow_python=true if you want that"
            )
        return make_python()
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, _ = name.rpartition(":")
    if not colon:
        near = get_close_matches(name, [*BUILT_IN, PYTHON], n=1)
        meant = f"did you mean {near[0]}?" if near else f"name one of {', '.join([*BUILT_IN, PYTHON])},"
        raise ConfigError(f"{section}tools: no built-in tool is called {name}; {meant} or path/to/file.py:function")
    if module.endswith(".py") or "/" in module or name.startswith(FROM_PYTHON):
        return load_named(name, f"{section}tools")
    found, error = result_or_error(lambda: resolve_name(name))
    if error is not None:
        raise ConfigError(
            f"{section}tools={name} cannot be imported: it {describe_error(error)}; fix the name"
        ) from error
    return found
