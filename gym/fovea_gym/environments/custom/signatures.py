"""Reward functions with the signatures of other trainers, recognised by the names of their parameters.

TRL's take `completions` and the columns of the row by name, all as lists. verl's take `solution_str`, EasyR1's take
`reward_input` (earlier: `predict_str`), and those that score a batch take the plurals of these names. Functions of
lists are called with lists of one completion.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from inspect import Parameter
from typing import Any, SupportsFloat, TypeAlias

from PIL.Image import Image

from fovea_gym.errors import ConfigError
from fovea_gym.settings.rewards import OVERLONG
from fovea_gym.types import Score, Task

RewardFunction: TypeAlias = Callable[..., object]
"""A function of the task, the completion's text and the task's images; it returns a number or a mapping of named parts.

If it has a parameter `response_length`, it is also called with this keyword: the completion's number of tokens.
"""
OWN_NAMES = ("task", "text", "images", "_task", "_text", "_images", "response_length")
"""Parameters of Fovea's own signature; one that a function does not use may begin with an underscore."""
ACCEPTED = (
    "accepted are def reward(task, text, images), TRL's reward(completions, **columns), verl's compute_score("
    "data_source, solution_str, ground_truth, extra_info=None) and EasyR1's compute_score(reward_input), each with "
    "further parameters that have defaults"
)
OF_THE_TRAINER = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that only TRL's trainer can pass."""
NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Keys of a row that TRL does not pass as columns."""
BYTES_PER_TOKEN = 4
"""UTF-8 bytes per token, typical of current vocabularies."""
_OWN = ("task", "text", "images")
_COLUMNS = ("data_source", "extra_info", "data_sources", "extra_infos")
"""Parameters of verl's signature that take columns of the row; the plurals take a list with one cell."""
_ANSWERS = ("solution_str", "predict_str", "reward_input", "solution_strs", "predicts", "reward_inputs")
"""Parameters by which verl's and EasyR1's signatures are recognised: the completion, or a list of completions."""
BESIDE_PARTS = ("image_parts", "marks", "turns")
"""Keys of a mapping that are not parts of the reward; a number that another trainer's function returns under one of
these names is logged as `NAME_part`."""
_REWARDS = ("score", "overall", "reward")
"""Keys of the reward in a mapping: verl's, EasyR1's, and verl's former one."""


def as_verl_result(score: Score) -> dict[str, float]:
    """The score as verl reads it: `score`, and `acc` and the parts for its log."""
    return {**score.parts, "score": score.reward, "acc": score.accuracy}


def as_easyr1_result(score: Score) -> dict[str, float]:
    """The score as EasyR1 reads it: `overall`, and `accuracy` and the parts for its log."""
    return {**score.parts, "overall": score.reward, "accuracy": score.accuracy}


def called_by_name(function: Callable[..., Any], name: str) -> RewardFunction | None:
    """Wrap a function with another trainer's signature; None for a function with any other signature.

    ConfigError if the function requires a parameter that the signature does not have.
    """
    parameters = _parameters(function)
    if "completions" in parameters:
        return _called_as_by_trl(function, parameters, name)
    if not any(each in parameters for each in _ANSWERS):
        return None
    check_required(function, _named_arguments(Task(id="", question="", answer=""), "", 0), name)
    is_batch = any(each in parameters for each in _ANSWERS[3:])

    def arguments(task: Task, text: str, response_length: int | None) -> dict[str, object]:
        given = _named_arguments(task, text, length_of(text, response_length))
        # the function's own default is used for a column that the row lacks
        lacking = [each for each in _COLUMNS if each.removesuffix("s") not in task.row]
        _check_columns(parameters, lacking)
        return {key: value for key, value in given.items() if key in parameters and key not in lacking}

    def result(returned: Any) -> object:
        return _parts(_only(returned) if is_batch else returned)

    def call(task: Task, text: str, images: Sequence[Image], response_length: int | None = None) -> object:
        return result(function(**arguments(task, text, response_length)))

    async def call_async(task: Task, text: str, images: Sequence[Image], response_length: int | None = None) -> object:
        return result(await function(**arguments(task, text, response_length)))

    return call_async if is_async(function) else call


def called_by_own_names(function: Callable[..., Any]) -> RewardFunction | None:
    """Wrap a function that has `task`, `text` and `images` in another order, or further arguments of ours.

    None for a function that takes exactly these three in order, and for any other signature.
    """
    parameters = _parameters(function)
    own = {each: each.removeprefix("_") for each in parameters if each in OWN_NAMES}
    by_place = (each for each, parameter in parameters.items() if parameter.kind is not Parameter.KEYWORD_ONLY)
    is_in_order = tuple(map(own.get, by_place))[: len(_OWN)] == _OWN
    if not {*_OWN} <= {*own.values()} or (is_in_order and len(own) == len(_OWN)):
        return None
    signature = inspect.signature(function)

    def bound(task: Task, text: str, images: Sequence[Image], response_length: int | None) -> inspect.BoundArguments:
        num_tokens = length_of(text, response_length)
        values = {"task": task, "text": text, "images": images, "response_length": num_tokens}
        return inspect.BoundArguments(signature, OrderedDict((each, values[name]) for each, name in own.items()))

    def call(task: Task, text: str, images: Sequence[Image], response_length: int | None = None) -> object:
        given = bound(task, text, images, response_length)
        return function(*given.args, **given.kwargs)

    async def call_async(task: Task, text: str, images: Sequence[Image], response_length: int | None = None) -> object:
        given = bound(task, text, images, response_length)
        return await function(*given.args, **given.kwargs)

    return call_async if is_async(function) else call


def check_places(function: Callable[..., object], name: str) -> None:
    """Raise ConfigError if a parameter with one of Fovea's names is in the position of another argument."""
    for each, place in zip(_parameters(function), _OWN, strict=False):
        if each in OWN_NAMES and each.removeprefix("_") != place:
            raise ConfigError(
                f"reward={name} has `{each}` where it is given the {place}; name all of task, text and images, in any "
                "order"
            )


def takes_length(function: Callable[..., object]) -> bool:
    """True if a reward function takes the number of tokens of the completion, as EasyR1's do."""
    return "response_length" in _parameters(function)


def check_required(function: Callable[..., object], known: Collection[str], name: str) -> None:
    """Raise ConfigError if a reward function requires a parameter whose name is not known."""
    for each, parameter in _parameters(function).items():
        if each not in known and not _is_open(parameter) and parameter.default is Parameter.empty:
            raise ConfigError(f"reward={name} needs `{each}`, which is never passed; give it a default; {ACCEPTED}")


def length_of(text: str, num_tokens: int | None) -> int:
    """Number of tokens of an answer, estimated from its bytes if they were not counted."""
    return -(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN) if num_tokens is None else num_tokens


def _check_columns(parameters: Mapping[str, Parameter], lacking: Collection[str]) -> None:
    """Raise ValueError if a required parameter is a column that the row lacks."""
    for each in lacking:
        if each in parameters and parameters[each].default is Parameter.empty:
            column = each.removesuffix("s") if each in _COLUMNS else each
            raise ValueError(
                f"the row has no column {column}, which the reward function requires as `{each}`; add the column, or "
                f"give the parameter a default ({each}=None)"
            )


def _is_open(parameter: Parameter) -> bool:
    """True for `*rest` and `**rest`."""
    return parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _named_arguments(task: Task, text: str, response_length: int) -> dict[str, object]:
    """Arguments of verl's and EasyR1's signatures by name; the caller leaves out columns that the row lacks."""
    source, extra = task.row.get("data_source"), task.row.get("extra_info")
    given = {"response": text, "response_length": response_length, "ground_truth": task.answer}
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
    """The reward and the other numbers in a mapping of verl's or EasyR1's form; other values are dropped."""
    if not isinstance(returned, Mapping):
        return returned
    key = next((each for each in _REWARDS if each in returned), None)
    if key is None:
        raise ValueError(f"it returned {returned!r:.60}, without `score` (verl) or `overall` (EasyR1); return one")
    numbers = {name: value for name, value in returned.items() if name != key and isinstance(value, SupportsFloat)}
    parts = {f"{name}_part" if name in (OVERLONG, *BESIDE_PARTS) else name: value for name, value in numbers.items()}
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
    needed = {each for each, parameter in parameters.items() if not _is_open(parameter)}
    known = {
        "answer",
        "prompts",
        "completions",
        "images",
        "image",
        *(key for key in task.row if key not in NOT_COLUMNS),
    }
    _check_columns(parameters, sorted(needed - known))
    messages = task.row.get("prompt")
    is_chat = isinstance(messages, Sequence) and not isinstance(messages, str)
    given: dict[str, Sequence[object]] = {"answer": [task.answer]}
    given |= {key: [cell] for key, cell in task.row.items() if key not in NOT_COLUMNS}
    given["prompts"] = [messages if is_chat else task.question]
    given["completions"] = [[{"role": "assistant", "content": text}] if is_chat else text]
    # images are opened only for a function that has these parameters
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
