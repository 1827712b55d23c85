"""Environments of gymnasium: pictures, actions by name, rewards of turns; from the registry and from a user's file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray

from fovea_gym.adapters.gymnasium import Gymnasium, action_in
from fovea_gym.errors import ConfigError
from fovea_gym.graders.base import NoScoreError
from fovea_gym.settings.environments import GymnasiumEnvironment
from fovea_gym.types import ImageRef, Message, Turn
from fovea_gym.utils.event_loop import gather_or_cancel, wait_for
from gym_tests.adapters.gym_game import Walk
from gym_tests.grading import played
from gym_tests.tables import table

GAMES = Path(__file__).parent / "gym_game.py"
ACTIONS = ("left", "right")


class RegisteredWalk(Walk):
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 (as gymnasium has it)

    def __init__(self, length: int = 6, *, render_mode: str) -> None:
        super().__init__(length)
        self.render_mode = render_mode


class Slow(RegisteredWalk):
    meeting = threading.Barrier(32, timeout=20)

    def step(self, action: int) -> Any:
        self.meeting.wait()  # breaks unless all episodes step at once
        return super().step(action)


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    for name, entry_point in (("FoveaWalk-v0", RegisteredWalk), ("FoveaSlow-v0", Slow)):
        gymnasium.register(name, entry_point=entry_point)
    yield
    for name in ("FoveaWalk-v0", "FoveaSlow-v0"):
        del gymnasium.registry[name]


def walk(**settings: Any) -> Gymnasium:
    given = {"id": f"{GAMES}:Walk", "actions": ACTIONS, "kwargs": {"length": 6}}
    return Gymnasium(GymnasiumEnvironment.model_validate(given | settings))


def pixels(message: Message) -> NDArray[np.uint8]:
    (picture,) = [part for part in message.parts if isinstance(part, ImageRef)]
    assert isinstance(picture.source, np.ndarray)
    return picture.source


def place(message: Message) -> int:
    """The cell that is white in a picture of the walk."""
    return int(pixels(message)[0, :, 0].argmax()) // 16


def test_an_episode_equals_the_environment_stepped_directly() -> None:
    environment = walk(kwargs={"length": 6, "wind": 0.5}, max_turns=8)
    assert environment.has_sessions
    task = environment.tasks("train")[3]
    answers = ["<action>right</action>", "I go LEFT.", *["<action>right</action>"] * 6]
    replies, score = played(environment, task, answers, seed=11)

    game = Walk(length=6, wind=0.5)
    game.reset(seed=3)
    np.testing.assert_array_equal(pixels(environment.prompt(task)[0]), game.render())
    game.np_random = np.random.default_rng(11)
    rewards, shown, is_over = [], [], False
    for action in [2, 1, 2, 2, 2, 2, 2, 2]:
        if not is_over:
            _, reward, is_over, _, _ = game.step(action)
            rewards.append(reward)
            shown.append(game.render())
    assert (score.turns, score.reward) == (pytest.approx(rewards), pytest.approx(sum(rewards)))
    assert score.accuracy == float(is_over)
    # nothing replies to the last action
    for reply, picture in zip(replies, shown[:-1], strict=True):
        np.testing.assert_array_equal(pixels(reply), picture)


def test_a_group_begins_alike_and_goes_on_by_its_seeds() -> None:
    environment = walk(kwargs={"length": 40, "wind": 0.5}, max_turns=9)
    task = environment.tasks("train")[0]
    answers = ["right"] * 8
    first, again, other = (played(environment, task, answers, seed)[0] for seed in (1, 1, 2))
    walked = [[place(reply) for reply in replies] for replies in (first, again, other)]
    assert walked[0] == walked[1] != walked[2]


def test_an_answer_without_an_action_is_a_failed_message_and_changes_nothing() -> None:
    environment = walk()
    task = environment.tasks("dev")[0]
    start = place(environment.prompt(task)[0])
    replies, score = played(environment, task, ["up we go", "<action>right</action>"])
    said = ("No action was read. Answer with one action, as <action>left</action>: left, right.",)
    assert (replies[0].failed, replies[0].parts) == (True, said)
    assert (place(replies[1]), score.turns[0], score.parts) == (start + 1, 0, {"invalid_actions": 1.0})


@table(
    ("text", "action"),
    [
        ("<action>left</action>", "left"),
        ("<action> Turn Right </action>", "turn right"),
        ("left is a wall: <action>left</action>, no: <action>turn right</action>", "turn right"),
        ("I go left.", "left"),
        ("left, left, left", "left"),
        ("not left but turn right", None),
        ("<action>up</action> left", None),
        ("leftover", None),
        ("", None),
    ],
)
def test_actions_are_read(text: str, action: str | None) -> None:
    assert action_in(text, ("left", "turn right")) == action


def test_no_seed_is_in_two_splits() -> None:
    environment = walk(train_size=5, dev_size=4, test_size=3)
    seeds = [[task.row["seed"] for task in environment.tasks(split)] for split in ("train", "dev", "test")]
    assert [len(each) for each in seeds] == [5, 4, 3]
    assert len({seed for each in seeds for seed in each}) == 12


@table(("settings", "accuracy"), [({}, 1), ({"success_key": "won"}, 1), ({"success_key": "lost"}, 0)])
def test_the_last_turn_counts_and_success_may_be_a_key_of_info(settings: dict[str, Any], accuracy: float) -> None:
    environment = walk(kwargs={"length": 3}, max_turns=2, **settings)
    replies, score = played(environment, environment.tasks("train")[0], ["<action>right</action>"] * 2)
    assert (len(replies), score.turns, score.accuracy) == (1, pytest.approx((-0.1, 1.0)), accuracy)


def test_an_environment_of_the_registry() -> None:
    environment = walk(id="FoveaWalk-v0", actions=(), kwargs={"length": 3})
    assert environment.actions == ("1", "2")
    assert played(environment, environment.tasks("train")[0], ["2", "2"])[1].accuracy == 1


@table(
    ("settings", "message"),
    [
        ({"id": "NoSuchGame-v0"}, r"^id=NoSuchGame-v0 cannot be made: NameNotFound: .*NoSuchGame"),
        ({"kwargs": {"size": 3}}, r"cannot be made: TypeError: .*'size'; correct id and kwargs"),
        ({"id": f"{GAMES}:Plain"}, r"Plain is not a subclass of gymnasium.Env; derive it from gymnasium.Env"),
        ({"id": f"{GAMES}:Continuous", "kwargs": {}}, r"action space Box.*only in a Discrete space"),
        ({"id": f"{GAMES}:Unseen"}, r"render\(\) returned NoneType , which is not a picture; return a numpy array"),
        ({"actions": ("left",)}, r"^actions has 1 names, but .* has 2 actions; name each"),
    ],
)
def test_what_does_not_fit_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message) as caught:
        walk(**settings)
    assert "\n" not in str(caught.value)


def test_a_step_that_raises_is_named_and_costs_only_its_episode() -> None:
    environment = walk(id=f"{GAMES}:Broken")
    with pytest.raises(NoScoreError, match=r"raised RuntimeError: the motor is stuck at .*gym_game.py:\d+"):
        played(environment, environment.tasks("train")[0], ["left"])


def test_steps_run_in_threads_side_by_side() -> None:
    environment = walk(id="FoveaSlow-v0", kwargs={})
    task = environment.tasks("train")[0]

    async def one() -> None:
        session = await environment.open(task, 0)
        assert session.has_score
        await session.reply([Turn(messages=(), text="right")])
        await session.close()

    wait_for(gather_or_cancel(one() for _ in range(32)))
