"""Lists of rewards and rewards of TRL's signature, compared with what TRL's own trainer computes of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fovea.config.loading import load_config
from fovea.wiring.environment import make_environment
from fovea_gym.environments.custom.grader import UserGrader
from fovea_gym.environments.custom.loading import checked_reward
from fovea_gym.errors import ConfigError, ScoreError, UnscoredError
from fovea_gym.graders.grading import CallLimits, CallThreads, Grading, LimitedCalls
from fovea_gym.types import ImageRef, Mark, Score, Task
from gym_tests.bandit import BanditEnvironment
from gym_tests.grading import score_in_run
from gym_tests.tables import table

TASK = replace(
    BanditEnvironment().tasks("train")[0], question="Which letter?", row={"solution": "b", "prompt": "Which letter?"}
)
CHAT = [{"role": "user", "content": "Which letter?"}]


def right(completions: list[str], solution: list[str], **columns: Any) -> list[float | None]:
    return [None if text == "?" else float(text == truth) for text, truth in zip(completions, solution, strict=True)]


def short(prompts: list[str], completions: list[str], log_extra: object = None, **columns: Any) -> list[float | None]:
    lengths = [len(prompt) - len(text) for prompt, text in zip(prompts, completions, strict=True)]
    return [None if "?" in text else length / 8 for text, length in zip(completions, lengths, strict=True)]


async def polite(completions: list[str], **columns: Any) -> list[float | None]:
    return [0.5 if "please" in text else None for text in completions]


FUNCTIONS = [right, short, polite]
WEIGHTS = [1.0, 0.1, -2.0]
ANSWERS = ["b", "a", "b, please", "?", "please?", ""]


def graded(*functions: Callable[..., Any], **settings: object) -> Grading:
    names = [f"python:tests.{function.__name__}" for function in functions]
    config = load_config([], [{"model": {"tiny": {}}, "reward": names, **settings}])
    return make_environment(config, BanditEnvironment(), functions).grading


@pytest.mark.slow
def test_the_weighted_sum_is_that_of_trls_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's own code calls the functions with the whole batch, and `nansum` adds what they give."""
    from trl.trainer import grpo_trainer  # noqa: PLC0415 (it takes seconds)

    monkeypatch.setattr(grpo_trainer, "logger", logging.getLogger("trl"))  # its own one needs a trainer
    loop = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=False),
        args=SimpleNamespace(report_to=[]),
        reward_funcs=[right, short],  # the asynchronous one needs the loop of a trainer
        reward_processing_classes=[None, None],
        reward_func_names=["right", "short"],
        state=SimpleNamespace(global_step=0),
        environments=None,
        _log_completion_extra=None,
        _log_metric=None,
        _metrics={"train": {}},
        model=SimpleNamespace(training=True),
    )
    rows = [dict(TASK.row) for _ in ANSWERS]
    prompts = [TASK.question] * len(ANSWERS)
    theirs_FR = grpo_trainer.GRPOTrainer._calculate_rewards(loop, rows, prompts, ANSWERS, [[0]] * len(ANSWERS))
    expected_R = (theirs_FR * torch.tensor(WEIGHTS[:2])).nansum(dim=1)
    grading = graded(right, short, reward_weights=WEIGHTS[:2])
    for place, answer in enumerate(ANSWERS):
        if theirs_FR[place].isnan().all():
            with pytest.raises(ScoreError, match=r"tests\.right, .* all returned None; at least one has to return"):
                score_in_run(grading, TASK, answer)
            continue
        score = score_in_run(grading, TASK, answer)
        assert score.reward == pytest.approx(expected_R[place].item())
        logged = [score.parts.get(name, float("nan")) for name in ("right", "short")]
        assert logged == pytest.approx(theirs_FR[place].tolist(), nan_ok=True)


@table(
    ("answer", "reward", "accuracy", "parts"),
    [
        ("b", 1 + 0.1 * 12 / 8, 1, {"right": 1, "short": 12 / 8}),
        ("b, please", 0.1 * 4 / 8 - 2 * 0.5, 0, {"right": 0, "short": 4 / 8, "polite": 0.5}),
        ("please?", 0 - 2 * 0.5, 0, {"right": 0, "polite": 0.5}),
    ],
)
def test_none_has_no_say(answer: str, reward: float, accuracy: float, parts: dict[str, float]) -> None:
    score = score_in_run(graded(*FUNCTIONS, reward_weights=WEIGHTS), TASK, answer)
    assert (score.reward, score.accuracy) == pytest.approx((reward, accuracy))
    assert score.parts == parts


def test_messages_are_messages_as_in_the_row() -> None:
    """TRL's functions get messages where the prompt is one; its own format reward reads nothing else."""
    seen: list[tuple[object, object]] = []

    def look(prompts: list[object], completions: list[object]) -> list[float]:
        seen.append((prompts, completions))
        return [1.0]

    for row in ({"prompt": CHAT}, TASK.row, {}):
        checked_reward(look, "look")(replace(TASK, row=row), "b", [])
    plain = (["Which letter?"], ["b"])
    assert seen == [([CHAT], [[{"role": "assistant", "content": "b"}]]), plain, plain]


def test_pictures_are_opened_for_a_function_that_names_them() -> None:
    def area(completions: list[str], images: list[list[Image.Image]], image: list[Image.Image]) -> list[int]:
        return [images[0][0].width * image[0].height]

    def blind(completions: list[str], **columns: Any) -> list[float]:
        assert "image" not in columns or columns["image"] == [b"raw"]
        return [1.0]

    pixels = ImageRef(source=np.zeros((2, 3, 3), np.uint8))
    task = replace(TASK, images=(pixels,), row={"image": b"raw"})
    assert score_in_run(graded(area), task, "b").parts == {"area": 6}
    unopenable = replace(task, images=(ImageRef(source=b"no picture"),))
    assert score_in_run(graded(blind), unopenable, "b").reward == 1


def boxes(task: Task, text: str, images: Sequence[Image.Image]) -> dict[str, object]:
    return {"named": 1, "image_parts": [{"found": 0.5}], "marks": [Mark(image=1, xy=(0.5, 0.5))]}


def more(task: Task, text: str, images: Sequence[Image.Image]) -> dict[str, object]:
    return {"reward": 2, "accuracy": 0.25, "image_parts": [{"found": 1}]}


def test_parts_are_named_after_their_function() -> None:
    task = replace(TASK, images=(ImageRef(source=np.zeros((2, 2, 3), np.uint8)),))
    assert score_in_run(graded(boxes, more), task, "b") == Score(
        reward=3,
        accuracy=1,
        parts={"boxes": 1, "boxes/named": 1, "more": 2, "more/accuracy": 0.25},
        image_parts=({"boxes/found": 0.5, "more/found": 1},),
        marks=(Mark(image=1, xy=(0.5, 0.5)),),
    )


def nothing(completions: list[str]) -> list[float]:
    return [float("nan")]


def breaks(completions: list[str], unknown_column: list[str]) -> list[float]:
    return [0.0]


@table(
    ("function", "message"),
    [
        (nothing, r"\(in nothing\) returned nan, which is not finite; fix it, or set reward_on_failure=drop"),
        (breaks, r"\(in breaks\) raised ValueError: the row has no column unknown_column"),
    ],
)
def test_the_function_that_fails_is_named(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ScoreError, match=message):
        score_in_run(graded(right, function), TASK, "b")


def test_a_list_is_written_in_a_recipe(tmp_path: Path) -> None:
    both = "def one(task, text, images): return 1\ndef half(completions, **columns): return [0.5]\n"
    (tmp_path / "mine.py").write_text(both)
    names = [f"{tmp_path}/mine.py:one", f"{tmp_path}/mine.py:half"]
    config = load_config([], ["model.tiny={}", f"reward=[{','.join(names)}]", "reward_weights=[1,-1]"])
    assert config.rewards == {"reward": tuple(names)}
    score = score_in_run(make_environment(config).grading, TASK, "b")
    assert (score.reward, score.parts) == (0.5, {"one": 1, "half": 0.5})
    with pytest.raises(ConfigError, match=r"mine\.py has no two; did you mean one\?|define it"):
        make_environment(load_config([], ["model.tiny={}", f"reward=[{tmp_path}/mine.py:two]"]))

    # its metric would be that of the penalty
    with pytest.raises(ConfigError, match=r"\breward/overlong\b.*\balgorithm\.overlong\b"):
        load_config([], ["model.tiny={}", "reward=[mine.py:one,mine.py:overlong]"])


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt(), ValueError("no")])
def test_what_ends_a_loop_is_a_call_without_a_score(error: BaseException) -> None:
    async def reward(_task: object, _turns: object) -> float:
        raise error

    limits = CallLimits(name="mine.py:f", timeout_seconds=30, on_failure="drop")
    grading = Grading(graders=(UserGrader(reward, CallThreads("mine.py:f")),), calls=LimitedCalls(limits))
    for _ in range(2):  # and the next call has a loop
        with pytest.raises(UnscoredError, match=rf"mine\.py:f raised {type(error).__name__}\b"):
            score_in_run(grading, TASK, "an answer")
    grading.close()
