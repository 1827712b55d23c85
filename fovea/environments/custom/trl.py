"""Reward functions of TRL's signature (`reward_funcs` of its GRPOTrainer), called for one completion at a time.

`prompts` and `completions` are lists of one, and so are the columns of the row, by name. They are texts, or lists of
messages where the row's column `prompt` is one. The function returns a list of one reward; None is not a reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from inspect import Parameter
from typing import Any, TypeAlias

from PIL.Image import Image

from fovea.errors import ConfigError
from fovea.types import Task

RewardFunction: TypeAlias = Callable[[Task, str, Sequence[Image]], object]
"""A function of the task, the text of the completion and the task's images: a number, or a mapping of named parts."""
OF_THE_TRAINER = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that only TRL's trainer has."""
NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Keys of a row that TRL does not pass as columns."""


def is_of_trl(function: Callable[..., object]) -> bool:
    """True if a function has TRL's signature: it takes `completions`."""
    return "completions" in _parameters(function)


def called_as_by_trl(function: Callable[..., Any], name: str) -> RewardFunction:
    """A reward function that calls one of TRL's signature; ConfigError where it needs what only TRL's trainer has."""
    parameters = _parameters(function)
    needed = [each for each in OF_THE_TRAINER if each in parameters and parameters[each].default is Parameter.empty]
    if needed:
        raise ConfigError(
            f"reward={name} needs `{needed[0]}`, which only TRL's trainer has; give it a default, {needed[0]}=None, "
            "or write def reward(task, text, images)"
        )

    def call(task: Task, text: str, images: Sequence[Image]) -> object:
        return _only(function(**_arguments(parameters, task, text, images)))

    async def call_async(task: Task, text: str, images: Sequence[Image]) -> object:
        return _only(await function(**_arguments(parameters, task, text, images)))

    return call_async if is_async(function) else call


def is_async(function: Callable[..., object]) -> bool:
    """True if a function, or the call of an object, is a coroutine function."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _parameters(function: Callable[..., object]) -> Mapping[str, Parameter]:
    with suppress(ValueError):  # some functions written in C have no signature
        return inspect.signature(function).parameters
    return {}


def _arguments(
    parameters: Mapping[str, Parameter], task: Task, text: str, images: Sequence[Image]
) -> dict[str, Sequence[object]]:
    messages = task.row.get("prompt")
    is_chat = isinstance(messages, Sequence) and not isinstance(messages, str)
    given: dict[str, Sequence[object]] = {"answer": [task.answer]}
    given |= {key: [cell] for key, cell in task.row.items() if key not in NOT_COLUMNS}
    given["prompts"] = [messages if is_chat else task.question]
    given["completions"] = [[{"role": "assistant", "content": text}] if is_chat else text]
    # opened only for a function that names them
    if "images" in parameters:
        given["images"] = [list(images)]
    if "image" in parameters:
        given["image"] = list(images[:1])
    takes_all = any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())
    return given if takes_all else {key: cells for key, cells in given.items() if key in parameters}


def _only(returned: Any) -> object:
    values = returned if isinstance(returned, str) or not hasattr(returned, "__len__") else list(returned)
    if not isinstance(values, list) or len(values) != 1:
        raise ValueError(f"it returned {returned!r:.60} for one completion; return a list of one reward")
    return values[0]
