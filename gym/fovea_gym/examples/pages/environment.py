"""Clicking on a small web page by coordinates: a control that the task names, or a menu first and then the control.

The effect of a click follows from the page and the place, so an episode keeps no state. Pictures are drawn from the
list of controls in a fraction of a millisecond; `page.html` gives the same page for a browser.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from fovea_gym.environments.access import Access
from fovea_gym.environments.base import Environment, Split
from fovea_gym.environments.hash_splits import row_generator, split_of
from fovea_gym.examples.pages.page import MENU, Control, picture, random_controls
from fovea_gym.rows.tasks import LazyTasks
from fovea_gym.settings.splits import DrawnRows
from fovea_gym.types import ImageRef, Mark, Message, Score, Task, Turn

_CLICK = re.compile(r"(\d{1,5}),(\d{1,5})")
_PAGES = "pages"
"""Key of the task's row that holds its pages."""
_KINDS = ("click", MENU)
"""Kinds of tasks, which alternate: one click, or one on the menu and another on a control."""
_SIDE_PX = 48
"""Side of a picture: 9 visual tokens of the tiny models; model.min_pixels enlarges it for others."""


class PagesEnvironment(DrawnRows):
    """A small web page in pictures: click the named control by coordinates, in half of the tasks after a menu."""

    name: Literal["pages"] = "pages"
    scale: Annotated[int, Field(ge=10, le=10_000)] = 1000
    """Coordinates of the right and the lower edge of the page; Qwen3-VL gives places from 0 to 1000."""

    def make(self, access: Access, seed: int) -> Pages:
        return Pages(self, seed)


class Pages(Environment):
    """The environment `pages`."""

    def __init__(self, settings: PagesEnvironment, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self.max_turns = 2
        self.graders = (PagesGrader(settings),)

    def tasks(self, split: Split) -> Sequence[Task]:
        settings = self._settings
        sizes = {"train": settings.train_size, "dev": settings.dev_size, "test": settings.test_size}
        return LazyTasks(lambda index: self._task(split, index), range(sizes[split]), kind_of=kind_of)

    def prompt(self, task: Task) -> Sequence[Message]:
        return (Message(role="user", parts=(*task.images, task.question)),)

    def reply(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message] | None:
        """The page with its menu open, after a click on the menu; any other click ends the episode."""
        pages = pages_of(task)
        if len(turns) == len(pages) or not _hits(task, turns, self._settings.scale)[-1]:
            return None
        return (Message(role="user", parts=(_drawn(pages[len(turns)], f"{task.id}, menu open"),)),)

    def target(self, task: Task) -> str:
        return self.demonstration(task)[0]

    def demonstration(self, task: Task) -> Sequence[str]:
        """Clicks on the centres of the controls."""
        centres = [controls[0].centre for controls in pages_of(task)]
        return [f"{round(x * self._settings.scale)},{round(y * self._settings.scale)}" for x, y in centres]

    def _task(self, split: Split, index: int) -> Task:
        rng, kind = row_generator(self._seed, split, index), kind_of(index)
        while True:
            controls = random_controls(int(rng.integers(3, 6)), rng)
            closed = random_controls(3, rng, menu=True) if kind == MENU else ()
            if split_of(repr((controls, closed)).encode()) == split:
                break
        name = controls[0].name
        task = f"Open the menu, then click the {name}." if closed else f"Click the {name}."
        return Task(
            id=f"{split}/{index}",
            question=f"{task} Answer with x,y from 0 to {self._settings.scale}.",
            answer=name,
            images=(_drawn(closed or controls, f"{split}/{index}"),),
            kind=kind,
            row={_PAGES: (closed, controls) if closed else (controls,)},
        )


class PagesGrader:
    """The grader of `pages`: every right click has an equal share of the reward; accuracy 1 if all are right."""

    def __init__(self, settings: PagesEnvironment) -> None:
        self._settings = settings

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        hits = _hits(task, turns, self._settings.scale)
        num_clicks = len(pages_of(task))
        is_right = sum(hits) == num_clicks
        first = click_in(turns[0].text, self._settings.scale)
        return Score(
            reward=sum(hits) / num_clicks,
            accuracy=float(is_right),
            parts={"format": sum(click_in(turn.text, self._settings.scale) is not None for turn in turns) / len(turns)},
            marks=() if first is None else (Mark(image=1, xy=first, label="click"),),
            turns=tuple(hit / num_clicks for hit in hits),
        )


def pages_of(task: Task) -> tuple[tuple[Control, ...], ...]:
    """The pages of a task in the order in which they are seen; the first control of each is the one to click."""
    pages: Any = task.row[_PAGES]
    return tuple(pages)


def click_in(text: str, scale: int) -> tuple[float, float] | None:
    """The place of a click `x,y`, in shares of the page's side; None for other answers and places outside the page."""
    found = _CLICK.fullmatch(text.strip())
    if found is None or max(int(found[1]), int(found[2])) > scale:
        return None
    return int(found[1]) / scale, int(found[2]) / scale


def kind_of(index: int) -> str:
    """The kind of a row."""
    return _KINDS[index % 2]


def _drawn(controls: Sequence[Control], where: str) -> ImageRef:
    return ImageRef(source=picture(controls, _SIDE_PX), where=where)


def _hits(task: Task, turns: Sequence[Turn], scale: int) -> list[bool]:
    """For each turn, True if it clicks the control that is next."""
    clicks = [click_in(turn.text, scale) for turn in turns]
    goals = [controls[0] for controls in pages_of(task)]
    return [click is not None and goal.is_hit(*click) for click, goal in zip(clicks, goals, strict=False)]
