"""Prompts of a data set: rendered at first use or ahead of it, cached within a memory limit, bad rows counted."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Literal, Protocol, TypeAlias, TypeVar

import numpy as np

from fovea.data.bad_rows import BadRows, with_skip
from fovea.data.order import RowOrder
from fovea.types import Prompt
from fovea_gym.environments.base import Environment
from fovea_gym.errors import BadRowError, DataError
from fovea_gym.rows.tasks import RowPlace, place_of
from fovea_gym.types import ImageRef, Message, PixelChange, Task, ToolSpec
from fovea_gym.utils.event_loop import Prefetch
from fovea_gym.utils.lru_cache import LRUCache

MAX_BAD_IN_A_ROW = 1000
Made = TypeVar("Made")
Key = TypeVar("Key", bound=Hashable)
SeenReply: TypeAlias = Callable[[Sequence[Message], str], Sequence[Message]]
"""A function from an environment's reply and the name of its turn to the messages that the model reads."""


def as_sent(messages: Sequence[Message], _where: str) -> Sequence[Message]:
    """The reply itself."""
    return messages


class RendersPrompts(Protocol):
    """`models.render.Renderer`, or a stand-in."""

    most_tokens: int | None
    """Most tokens of a prompt that leave a completion positions of the model; None: not known."""

    def fewest_tokens(self, messages: Sequence[Message]) -> int: ...

    def prompt(self, messages: Sequence[Message], where: str = ..., tools: Sequence[ToolSpec] = ...) -> Prompt: ...

    def observation(self, messages: Sequence[Message], *, after: int, where: str = ...) -> Prompt: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptedTask:
    """A task with its rendered prompt."""

    task: Task
    prompt: Prompt
    noisy: Prompt | None = None
    """The prompt on which some completions are drawn in its place."""
    masked: Prompt | None = None
    """The prompt of a term of the loss."""

    @property
    def num_bytes(self) -> int:
        """About the memory of the task and the prompt, in which pictures take nearly all."""
        held = sum(_held_bytes(image) for image in self.task.images)
        pixels = sum(image.num_bytes for image in self.prompt.images)
        return 1024 + self.prompt.token_ids_L.nbytes * 4 + pixels + held


def _held_bytes(image: ImageRef) -> int:
    source = image.source
    if isinstance(source, np.ndarray):
        return source.nbytes
    if isinstance(source, (bytes, str)):
        return len(source)
    return source.width * source.height * len(source.getbands())


class PromptSource:
    """Prompts of one split."""

    def __init__(
        self,
        tasks: Sequence[Task],
        environment: Environment,
        renderer: RendersPrompts,
        *,
        max_prompt_tokens: int,
        on_bad_row: Literal["error", "skip"],
        cache_gib: float,
        bad_rows: BadRows | None = None,
    ) -> None:
        self.tasks = tasks
        self.seen_reply: SeenReply = as_sent
        self._environment = environment
        self.renderer = renderer
        self._max_prompt_tokens = max_prompt_tokens
        self._on_bad_row = on_bad_row
        self._cache: LRUCache[int, PromptedTask] = LRUCache(cache_gib * 2**30)
        self._listed = BadRows() if bad_rows is None else bad_rows
        self.bad_rows: dict[int, str] = {}
        self._num_threads = 0
        self._ahead: Prefetch[int, PromptedTask] | None = None

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def has_replies(self) -> bool:
        """True if an episode may have replies of the environment."""
        return self._environment.max_turns > 1

    def render_ahead(self, num_threads: int) -> None:
        """From now on, after every `take`, render as many rows after it on so many threads; 0: on none."""
        self._num_threads = num_threads
        self._ahead = Prefetch(num_threads, "prompts") if num_threads else None

    def take(self, order: RowOrder, n: int) -> list[PromptedTask]:
        """The next n usable rows of an order; fewer where it ends."""
        taken: list[PromptedTask] = []
        bad_in_a_row = 0
        while len(taken) < n and (indices := order.take(n - len(taken))):
            for prompted in map(self.get, indices):
                bad_in_a_row = 0 if prompted else bad_in_a_row + 1
                taken += [prompted] if prompted else []
            if bad_in_a_row > MAX_BAD_IN_A_ROW:
                last = next(reversed(self.bad_rows.values()), "one that was bad before")
                raise DataError(
                    f"{bad_in_a_row} bad rows in a row, the last one: {last}; "
                    "set data.on_bad_row=error to stop at the first"
                )
        if self._ahead is not None:
            self._ahead.begin(self._coming(order, n))
        return taken

    def has_more(self, order: RowOrder) -> bool:
        """True if an order still holds a usable row."""
        rest = order.rest()
        return rest is None or any(self.get(index) is not None for index in rest)

    def get(self, index: int) -> PromptedTask | None:
        """One row; None when it is bad and data.on_bad_row is skip."""
        cached = self._cache.get(index)
        if cached is None:
            cached = self.read(index, lambda: self._rendered(index))
            if cached is not None:
                self._cache.put(index, cached, cached.num_bytes)
        return cached

    def read(self, index: int, make: Callable[[], Made]) -> Made | None:
        """The result of `make` for a row; None, and the row is listed, when it is bad and data.on_bad_row is skip."""
        if index in self.bad_rows:
            return None
        place = place_of(self.tasks, index)
        if place and place.key in self._listed:  # found by another split, or before a resume
            return None
        try:
            return make()
        except DataError as error:
            if self._on_bad_row == "error":
                raise with_skip(error) from error
            self.bad_rows[index] = str(error)
            # the error of a row that is in no file begins with the row's name
            self._listed.add(place or RowPlace(str(error), str(error).partition(":")[0]), error)
            return None

    def peek(self, make: Callable[[], Made]) -> Made | None:
        """As `read`, for rows that the data order may never come to: a bad row is not listed."""
        try:
            return make()
        except DataError as error:
            if self._on_bad_row == "error":
                raise with_skip(error) from error
            return None

    def with_tasks(self, tasks: Sequence[Task], seen_reply: SeenReply) -> PromptSource:
        """A source of other tasks and other replies under the same rules, without a cache."""
        other = copy(self)
        other.tasks, other.seen_reply = tasks, seen_reply
        other.bad_rows, other._cache = {}, LRUCache(0.0)
        other.render_ahead(0)
        return other

    def render(
        self, task: Task, messages: Sequence[Message] | None = None, *, where: str | None = None
    ) -> PromptedTask:
        """The prompt of a task, of these or its own messages, which is not kept; DataError if bad, with `where`."""
        where = where or task.id
        asked = self._environment.prompt(task) if messages is None else messages
        # a processed image takes thousands of times the memory of its file: a row too long is refused before
        self._check_length(self.renderer.fewest_tokens(asked), where, "at least ")
        tools = self._environment.tools(task)
        prompt = self.renderer.prompt(asked, where=where, tools=[tool.spec for tool in tools])
        self._check_length(prompt.num_tokens, where)
        return PromptedTask(task=task, prompt=prompt)

    def augmented(self, item: PromptedTask, change: Callable[[int], PixelChange]) -> Callable[[], Prompt]:
        """A function, for any thread, that renders the prompt, of equal token ids, with pictures changed by number."""
        numbers = count()

        def changed(part: str | ImageRef) -> str | ImageRef:
            return replace(part, change=change(next(numbers))) if isinstance(part, ImageRef) else part

        asked = self._environment.prompt(item.task)
        messages = [replace(each, parts=tuple(map(changed, each.parts))) for each in asked]

        def rendered() -> Prompt:
            prompt = self.render(item.task, messages).prompt
            assert np.array_equal(prompt.token_ids_L, item.prompt.token_ids_L), (
                f"{item.task.id}: an augmented prompt has other text"
            )
            return prompt

        return rendered

    def at_once(self, works: Mapping[Key, Callable[[], Made]]) -> dict[Key, Made]:
        """The results of these works, on the threads of `render_ahead` where there are any."""
        ahead: Prefetch[Key, Made] = Prefetch(self._num_threads, "augmentations")
        ahead.begin(works)
        return {key: (ahead.take(key) or work)() for key, work in works.items()}

    def _rendered(self, index: int) -> PromptedTask:
        """The prompt of a row, by a thread that is on it or by this one; an error is that of rendering it now."""
        ahead = None if self._ahead is None else self._ahead.take(index)
        return self.render(self.tasks[index], where=self._where(index)) if ahead is None else ahead()

    def _coming(self, order: RowOrder, n: int) -> dict[int, Callable[[], PromptedTask]]:
        """Calls that render the next n rows of an order, without advancing it."""
        position = order.state()
        coming = [index for index in order.take(n) if index not in self.bad_rows and index not in self._cache]
        order.restore(position)
        works: dict[int, Callable[[], PromptedTask]] = {}
        for index in coming:
            # read by this thread, since code of the user's own may not be made for several; raised when the row's turn
            # comes, which may be never
            with suppress(Exception):
                task = self.tasks[index]
                works[index] = partial(self.render, task, self._environment.prompt(task), where=self._where(index))
        return works

    def _check_length(self, num_tokens: int, where: str, bound: str = "") -> None:
        length, most_tokens = f"the prompt has {bound}{num_tokens} tokens, images included", self.renderer.most_tokens
        if num_tokens > self._max_prompt_tokens:
            limit, fix = f"data.max_prompt_tokens={self._max_prompt_tokens}", "raise that, lower model.max_pixels"
        elif most_tokens is not None and num_tokens > most_tokens:
            limit = f"the model has positions for {most_tokens} beside a completion"
            fix = "lower rollout.max_new_tokens or model.max_pixels"
        else:
            return
        raise BadRowError(f"{where}: {length}, and {limit}", "prompt_too_long", fix)

    def _where(self, index: int) -> str | None:
        place = place_of(self.tasks, index)
        return place.where if place else None
