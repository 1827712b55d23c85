"""Signatures of reward functions that other trainers publish, told by the names of their parameters.

TRL's take `completions`, with the columns of the row by name, all as lists. verl's take `solution_str`, EasyR1's
`reward_input` (before: `predict_str`), and those that score a batch the plural of these names. Functions of lists are
called with lists of one completion.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from inspect import Parameter
from typing import Any, SupportsFloat, TypeAlias

from PIL.Image import Image

from fovea_gym.errors import ConfigError
from fovea_gym.types import Score, Task

RewardFunction: TypeAlias = Callable[[Task, str, Sequence[Image]], object]
"""A function of the task, the text of the completion and the task's images: a number, or a mapping of named parts."""
OWN_NAMES = ("task", "text", "images", "_task", "_text", "_images")
"""Parameters of Fovea's own signature; one that a function does not use may begin with an underscore."""
ACCEPTED = (
    "accepted are def reward(task, text, images), TRL's reward(completions, **columns), verl's compute_score("
    "data_source, solution_str, ground_truth, extra_info=None) and EasyR1's compute_score(reward_input), each with "
    "further parameters that have defaults"
)
OF_THE_TRAINER = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that only TRL's trainer has."""
NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Keys of a row that TRL does not pass as columns."""
_ANSWERS = ("solution_str", "predict_str", "reward_input", "solution_strs", "predicts", "reward_inputs")
"""Parameters that tell verl's and EasyR1's signatures: each takes the completion, or a list of them."""
_REWARDS = ("score", "overall", "reward")
"""Keys of the reward in a mapping: verl's, EasyR1's, and verl's before."""


def as_verl_result(score: Score) -> dict[str, float]:
    """The score as verl reads it: `score`, and `acc` and the parts for its log."""
    return {**score.parts, "score": score.reward, "acc": score.accuracy}


def as_easyr1_result(score: Score) -> dict[str, float]:
    """The score as EasyR1 reads it: `overall`, and `accuracy` and the parts for its log."""
    return {**score.parts, "overall": score.reward, "accuracy": score.accuracy}


def called_by_name(function: Callable[..., Any], name: str) -> RewardFunction | None:
    """A reward function that calls one of a published signature; None for a function of another.

    ConfigError where a required parameter is none of that signature.
    """
    parameters = _parameters(function)
    if "completions" in parameters:
        return _called_as_by_trl(function, parameters, name)
    if not any(each in parameters for each in _ANSWERS):
        return None
    check_required(function, _named_arguments(Task(id="", question="", answer=""), ""), name)
    is_batch = any(each in parameters for each in _ANSWERS[3:])

    def arguments(task: Task, text: str) -> dict[str, object]:
        return {key: value for key, value in _named_arguments(task, text).items() if key in parameters}

    def result(returned: Any) -> object:
        return _parts(_only(returned) if is_batch else returned)

    def call(task: Task, text: str, images: Sequence[Image]) -> object:
        return result(function(**arguments(task, text)))

    async def call_async(task: Task, text: str, images: Sequence[Image]) -> object:
        return result(await function(**arguments(task, text)))

    return call_async if is_async(function) else call


def check_required(function: Callable[..., object], known: Collection[str], name: str) -> None:
    """ConfigError for a required parameter of a reward function whose name is not known."""
    for each, parameter in _parameters(function).items():
        is_open = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        if each not in known and not is_open and parameter.default is Parameter.empty:
            raise ConfigError(f"reward={name} needs `{each}`, which nothing gives; give it a default; {ACCEPTED}")


def _named_arguments(task: Task, text: str) -> dict[str, object]:
    """The arguments of verl's and EasyR1's signatures by name; None for a column that the row lacks."""
    source, extra = task.row.get("data_source"), task.row.get("extra_info")
    given = {"response": text, "ground_truth": task.answer}
    one = {"data_source": source, "solution_str": text, "ground_truth": task.answer, "extra_info": extra}
    return {
        **one,
        "predict_str": text,
        "reward_input": given,
        **{f"{key}s": [value] for key, value in one.items()},
        "predicts": [text],
        "reward_inputs": [given],
    }


def _parts(returned: Any) -> object:
    """The reward and the numbers beside it of a mapping that verl or EasyR1 reads; other values are dropped."""
    if not isinstance(returned, Mapping):
        return returned
    key = next((each for each in _REWARDS if each in returned), None)
    if key is None:
        raise ValueError(f"it returned {returned!r:.60}, without `score` (verl) or `overall` (EasyR1); return one")
    parts = {name: value for name, value in returned.items() if name != key and isinstance(value, SupportsFloat)}
    accuracy = {"accuracy": parts["acc"]} if "acc" in parts and "accuracy" not in parts else {}
    return {**parts, **accuracy, "reward": returned[key]}


def _called_as_by_trl(function: Callable[..., Any], parameters: Mapping[str, Parameter], name: str) -> RewardFunction:
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
    values = returned if isinstance(returned, str | Mapping) or not hasattr(returned, "__len__") else list(returned)
    if not isinstance(values, list) or len(values) != 1:
        raise ValueError(f"it returned {returned!r:.60} for one completion; return a list of one reward")
    return values[0]
