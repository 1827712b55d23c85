"""Pages to click on: rewards of clicks, and no page in two splits."""

from __future__ import annotations

from typing import Any

import pytest

from fovea_gym.environments.base import Split
from fovea_gym.examples.pages.environment import Pages, PagesEnvironment, click_in, pages_of
from fovea_gym.examples.pages.page import picture
from gym_tests.grading import played

SPLITS: tuple[Split, ...] = ("train", "dev", "test")


@pytest.mark.parametrize("settings", [{}, {"scale": 99}])
def test_clicks_on_the_centres_are_right(settings: dict[str, Any]) -> None:
    environment = Pages(PagesEnvironment(**settings), 0)
    for split in SPLITS:
        for task in environment.tasks(split)[:30]:
            texts = environment.demonstration(task)
            replies, score = played(environment, task, texts)
            assert len(texts) == (2 if task.kind == "menu" else 1)
            assert len(replies) == len(texts) - 1
            assert (score.reward, score.accuracy, score.parts) == (1.0, 1.0, {"format": 1.0})
            assert score.turns == (1 / len(texts),) * len(texts)


def test_a_wrong_click_ends_the_episode_and_a_menu_is_half_of_its_task() -> None:
    environment = Pages(PagesEnvironment(), 0)
    task = environment.tasks("test")[1]
    menu, control = environment.demonstration(task)
    closed, opened = pages_of(task)
    decoy = ",".join(str(round(1000 * place)) for place in closed[1].centre)
    replies, score = played(environment, task, [menu, menu[::-1]])
    assert (replies[0].parts[0].source == picture(opened, 48)).all()  # type: ignore[union-attr]
    assert (score.reward, score.accuracy, score.turns) == (0.5, 0.0, (0.5, 0.0))
    replies, score = played(environment, task, [decoy, control])
    assert (replies, score.reward, score.turns) == ([], 0.0, (0.0,))


def test_neither_word_of_a_control_is_enough_to_find_it() -> None:
    for task in Pages(PagesEnvironment(), 0).tasks("train")[:100]:
        asked, same_kind, same_colour, *_ = pages_of(task)[-1]
        assert (same_kind.kind, same_colour.colour) == (asked.kind, asked.colour)
        assert len({control.name for control in pages_of(task)[-1]}) == len(pages_of(task)[-1])


def test_no_page_is_in_two_splits() -> None:
    environment = Pages(PagesEnvironment(), 0)
    seen = {
        split: {task.images[0].source.tobytes() for task in environment.tasks(split)[:200]}  # type: ignore[union-attr]
        for split in SPLITS
    }
    assert seen["train"].isdisjoint(seen["dev"] | seen["test"])
    assert seen["dev"].isdisjoint(seen["test"])


def test_clicks_in_answers() -> None:
    assert click_in(" 250,1000 ", 1000) == (0.25, 1.0)
    answers = ("250,1001", "-1,5", "1.5,2", "click(1,2)", "1,2,3", "", "1" * 5000 + ",1")
    assert [click_in(answer, 1000) for answer in answers] == [None] * len(answers)
