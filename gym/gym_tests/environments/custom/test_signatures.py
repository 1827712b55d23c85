"""Reward files of verl, EasyR1 and TRL, unchanged: called by the names of their parameters, their results read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from fovea_gym.environments.custom.grader import score_function, score_of
from fovea_gym.environments.custom.loading import checked_reward
from fovea_gym.environments.custom.signatures import takes_length
from fovea_gym.errors import ConfigError
from fovea_gym.rows.opening import default_opener
from fovea_gym.types import Task, Turn
from fovea_gym.utils.event_loop import wait_for
from gym_tests.tables import table

TASK = Task(
    id="train/0",
    question="What is x?",
    answer="5",
    row={"data_source": "made", "extra_info": {"split": "train"}, "problem": "What is x?"},
)
GOLD, WRONG = r"So x is \boxed{5}.", r"So x is \boxed{6}."


def is_right(text: str, truth: str) -> float:
    return float(f"\\boxed{{{truth}}}" in text)


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    assert (data_source, extra_info) == ("made", {"split": "train"})
    return is_right(solution_str, ground_truth)


def verl_of_more(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, **kwargs: Any) -> Any:
    assert kwargs == {}
    right = is_right(solution_str, ground_truth)
    return {"score": 2 * right - 1, "acc": bool(right), "pred": solution_str, "details": None}


def verl_of_its_own(solution_str: str, ground_truth: str, method: str = "strict") -> float:
    return is_right(solution_str, ground_truth)


async def verl_async(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any, reward_router_address: str | None = None
) -> dict[str, Any]:
    return {"score": is_right(solution_str, ground_truth), "acc": is_right(solution_str, ground_truth)}


def verl_batch(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[str], extra_infos: list[Any]
) -> list[float]:
    assert (data_sources, extra_infos) == (["made"], [{"split": "train"}])
    return [is_right(*each) for each in zip(solution_strs, ground_truths, strict=True)]


def verl_geo3k(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    return is_right(predict_str, ground_truth)


def easyr1(reward_input: dict[str, Any], format_weight: float = 0.5) -> dict[str, float]:
    right = is_right(reward_input["response"], reward_input["ground_truth"])
    return {"overall": right * (1 - format_weight), "format": 0.0, "accuracy": right}


def easyr1_batch(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    assert isinstance(reward_inputs, list)
    return [easyr1(each, format_weight) for each in reward_inputs]


def easyr1_dapo(
    reward_inputs: list[dict[str, Any]],
    max_response_length: int = 8,
    overlong_buffer_length: int = 4,
    overlong_penalty_factor: float = 1.0,
) -> list[dict[str, float]]:
    """Its penalty of long answers, by the key that newer versions give."""
    scores = []
    for each in reward_inputs:
        over = each["response_length"] - (max_response_length - overlong_buffer_length)
        penalty = -min(max(over, 0) / overlong_buffer_length, 1.0)
        right = is_right(each["response"], each["ground_truth"])
        scores.append({"overall": right + penalty * overlong_penalty_factor, "accuracy": right, "overlong": penalty})
    return scores


def easyr1_before(predicts: list[str], ground_truths: list[str], format_weight: float = 0.1) -> list[dict[str, float]]:
    right = [is_right(*each) for each in zip(predicts, ground_truths, strict=True)]
    return [{"overall": each, "format": 0.0, "accuracy": each} for each in right]


def trl(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [is_right(*each) for each in zip(completions, answer, strict=True)]


def ours(task: Task, text: str, _images: object) -> float:
    return is_right(text, task.answer)


def called(function: Callable[..., Any], task: Task, text: str) -> Any:
    returned = checked_reward(function, "file.py:compute_score")(task, text, [])
    return wait_for(returned) if function is verl_async else returned  # type: ignore[arg-type]


@table(
    ("function", "gold", "wrong", "parts"),
    [
        (verl, 1, 0, {}),
        (verl_of_more, 1, -1, {"acc": 1, "accuracy": 1}),
        (verl_of_its_own, 1, 0, {}),
        (verl_async, 1, 0, {"acc": 1, "accuracy": 1}),
        (verl_batch, 1, 0, {}),
        (verl_geo3k, 1, 0, {}),
        (easyr1, 0.5, 0, {"format": 0, "accuracy": 1}),
        (easyr1_batch, 0.9, 0, {"format": 0, "accuracy": 1}),
        (easyr1_dapo, 0.75, -0.25, {"accuracy": 1, "overlong_part": -0.25}),
        (easyr1_before, 1, 0, {"format": 0, "accuracy": 1}),
        (trl, 1, 0, {}),
        (ours, 1, 0, {}),
    ],
)
def test_a_published_signature_rewards_the_gold_answer(
    function: Callable[..., Any], gold: float, wrong: float, parts: dict[str, float]
) -> None:
    right, other = (score_of(called(function, TASK, text), num_images=0) for text in (GOLD, WRONG))
    assert (right.reward, right.accuracy, right.parts) == (gold, gold if not parts else 1, parts)
    assert (other.reward, other.accuracy) == (wrong, 0)


@table(
    ("num_tokens", "overlong"),
    [(4, 0), (6, -0.5), (8, -1), (100, -1), (None, -0.25)],  # 19 bytes are 5 tokens where nobody has counted them
)
def test_easyr1_gets_the_length_of_the_answer_in_tokens(num_tokens: int | None, overlong: float) -> None:
    grade = score_function(checked_reward(easyr1_dapo, "file.py:compute_score"), default_opener())
    score = score_of(grade(TASK, [Turn(messages=(), text=GOLD, num_tokens=num_tokens)]), num_images=0)
    assert (score.reward, dict(score.parts)["overlong_part"]) == (1 + overlong, overlong)


def test_a_column_that_a_row_lacks_is_named_where_the_function_requires_it() -> None:
    def optional(solution_str: str, ground_truth: str, data_source: str = "mine", extra_info: object = 7) -> float:
        assert (data_source, extra_info) == ("mine", 7)
        return 1.0

    task = replace(TASK, row={"problem": "What is x?"})
    assert called(optional, task, GOLD) == 1
    assert called(optional, replace(TASK, row={"data_source": "mine", "extra_info": 7}), GOLD) == 1
    for function, column in (
        (verl, "data_source"),
        (verl_batch, "data_source"),
        (lambda solution_str, ground_truth, extra_info: 1.0, "extra_info"),
        (trl, "answer_of_mine"),
    ):
        given = (lambda completions, answer_of_mine: [1.0]) if function is trl else function
        with pytest.raises(ValueError, match=rf"the row has no column {column}, which the reward function requires as"):
            called(given, task, GOLD)


def names(task: Any, text: Any, images: Any) -> float:
    """1 where each argument is what its name says."""
    return float((task, text, images) == (TASK, GOLD, []))


async def names_async(images: Any, task: Any, text: Any) -> float:
    return names(task, text, images)


@table(
    "function",
    [
        lambda images, task, text: names(task, text, images),
        lambda text, images, _task: names(_task, text, images),
        lambda images, text, task, weight=1.0: weight * names(task, text, images),
        lambda weight=1.0, task=None, text=None, images=None: weight * names(task, text, images),
        lambda images, text, task, *rest, **more: names(task, text, images),
        lambda *, images, text, task: names(task, text, images),
        lambda *, task, text, images: names(task, text, images),
        partial(lambda weight, images, text, task: weight * names(task, text, images), 1.0),
        names,
        lambda *arguments: names(*arguments[:2], *arguments[2:]),
    ],
)
def test_own_names_are_given_by_name_in_any_order(function: Callable[..., Any]) -> None:
    assert called(function, TASK, GOLD) == 1


def test_own_names_of_a_coroutine_are_given_by_name() -> None:
    assert wait_for(checked_reward(names_async, "file.py:names_async")(TASK, GOLD, [])) == 1  # type: ignore[arg-type]


@table(
    "function",
    [lambda text, task, *rest: 0, lambda images, *rest: 0, lambda task, images, more=1: 0, lambda a=0, task=1, c=2: 0],
)
def test_own_names_at_places_of_others_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="where it is given the"):
        checked_reward(function, "file.py:reward")


def test_a_mapping_without_a_reward_is_named() -> None:
    with pytest.raises(ValueError, match=r"without `score` \(verl\) or `overall` \(EasyR1\)"):
        called(lambda solution_str, ground_truth: {"acc": 1.0}, TASK, GOLD)
    with pytest.raises(ValueError, match="for one completion; return a list of one reward"):
        called(lambda reward_inputs: {"overall": 1.0}, TASK, GOLD)


@table(
    ("function", "unknown"),
    [
        (lambda reward_inputs, max_response_length: [], "max_response_length"),
        (
            lambda data_source, solution_str, ground_truth, extra_info, reward_model_tokenizer: 0,
            "reward_model_tokenizer",
        ),
        (lambda data_source, response, ground_truth: 0, "data_source"),
        (lambda answer: 0, "answer"),
        (lambda task, answer, images: 0, "answer"),
    ],
)
def test_an_unknown_required_parameter_is_refused_with_the_accepted_forms(
    function: Callable[..., Any], unknown: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        checked_reward(function, "file.py:compute_score")
    assert f"reward=file.py:compute_score needs `{unknown}`" in str(refused.value)
    for form in (
        "reward(task, text, images)",
        "reward(completions, **columns)",
        "data_source, solution_str",
        "reward_i",
    ):
        assert form in str(refused.value)


@table(
    "function",
    [
        lambda task, text, images, response_length=None: response_length,
        lambda images, text, task, response_length=None: response_length,
        lambda task, text, images, response_length: response_length,
        lambda response_length, _images, text, _task: response_length,
    ],
)
def test_a_function_of_ours_gets_the_length_of_the_answer_by_name(function: Callable[..., Any]) -> None:
    reward = checked_reward(function, "file.py:reward")
    assert takes_length(reward)
    assert reward(TASK, GOLD, [], response_length=7) == 7
    assert reward(TASK, "x" * 40, []) == 10, "an estimate, where nobody has counted"
