"""Evaluation of a model on the rows of a prompt source, for the training loop and `fovea eval`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import NoReturn, Protocol, TypeAlias

from fovea.data.prompt_source import PromptedTask, PromptSource
from fovea.evaluation.records import AnsweredRow, TaskRow, recorded_episode
from fovea.evaluation.statistics import parts_of
from fovea.rollout.base import Engine, HoldsImages
from fovea.rollout.collect import Interaction, collect
from fovea.types import Episode, Evaluation, Sampling
from fovea_gym.environments.base import Environment
from fovea_gym.errors import BadRowError, ConfigError, ScoreError, UnscoredError
from fovea_gym.graders.grading import Grading
from fovea_gym.types import Task

Answered: TypeAlias = Sequence[Episode] | BadRowError | UnscoredError
"""The scored episodes of a row, or the error that explains why there are none."""
Seed: TypeAlias = tuple[int, int]
"""The seed of an evaluation, and the index of the chunk's first row."""


def task_row(task: Task, index: int, image_type_key: str | None) -> TaskRow:
    """The record of a source's row, without answers; ConfigError if the row does not have `image_type_key`."""
    if image_type_key is not None and image_type_key not in task.row:
        raise ConfigError(
            f"evaluate.image_type_key={image_type_key}, but {task.id} has no such key, only "
            f"{', '.join(task.row) or 'none'}; set a key that all rows have"
        )
    return TaskRow(
        id=task.id,
        index=index,
        kind=task.kind,
        question=task.question,
        truth=task.answer,
        image_type=None if image_type_key is None else str(task.row[image_type_key]),
    )


def answered_rows(
    source: PromptSource,
    tasks: Mapping[int, Task],
    answered: Sequence[Answered],
    *,
    unscored: list[str] | None,
    image_type_key: str | None = None,
) -> Iterator[AnsweredRow]:
    """Yield the records of the rows in `tasks` that have episodes.

    Bad rows are reported to the source. Errors of rows without a score are appended to `unscored`, or raised if None.
    """
    for (index, task), episodes in zip(tasks.items(), answered, strict=True):
        if isinstance(episodes, BadRowError):
            source.read(index, partial(_raise, episodes))
        elif isinstance(episodes, UnscoredError):
            if unscored is None:
                raise episodes
            unscored.append(str(episodes))
        else:
            first_turn = episodes[0].tokens[:1]
            yield AnsweredRow(
                **asdict(task_row(task, index, image_type_key)),
                answers=tuple(map(recorded_episode, episodes)),
                token_ids=tuple(first_turn[0].completion.token_ids_T.tolist()) if first_turn else (),
            )


def _raise(error: BadRowError) -> NoReturn:
    raise error


class Answers(Protocol):
    """A model that answers rows, either with a local engine (`EngineAnswers`) or on a server (`ServerAnswers`)."""

    async def episodes(
        self, source: PromptSource, rows: Mapping[int, PromptedTask], sampling: Sampling, *, n: int, seed: Seed
    ) -> Sequence[Answered]:
        """`n` scored episodes for each row of a chunk, or the error that explains why there are none."""
        ...


class Evaluator:
    """Lets a model answer the prompts of a source, greedily unless sampling is given, and computes its scores."""

    def __init__(
        self,
        model: Answers,
        *,
        greedy: Sampling,
        batch_size: int,
        image_type_key: str | None = None,
        on_unscored: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_unscored` is called with the reason for each row that `evaluate` left out of its averages."""
        self._model = model
        self._greedy = greedy
        self._batch_size = batch_size
        self._image_type_key = image_type_key
        self._on_unscored = on_unscored

    async def evaluate(
        self,
        source: PromptSource,
        size: int | None = None,
        keep: Callable[[Sequence[AnsweredRow]], None] = lambda _: None,
    ) -> Evaluation:
        """Score the greedy answers to the first `size` rows and pass them to `keep`; bad rows are skipped.

        Rows without a score are left out and counted; ScoreError if no row has one.
        """
        unscored = list[str]()
        rows = await self.answers(source, size, unscored=unscored)
        for reason in unscored:
            self._on_unscored(reason)
        if unscored and not rows:
            raise ScoreError(f"none of the {len(unscored)} held-out rows could be scored; the last one: {unscored[-1]}")
        keep(rows)
        return Evaluation(
            accuracies=_accuracies_by(rows, lambda row: row.kind),
            by_image_type=_accuracies_by(rows, lambda row: row.image_type),
            rewards=tuple(row.answers[0].reward for row in rows),
            parts=parts_of(row.answers[0] for row in rows),
            num_unscored=len(unscored),
        )

    async def answers(
        self,
        source: PromptSource,
        size: int | None = None,
        *,
        sampling: Sampling | None = None,
        n: int = 1,
        seed: int = 0,
        unscored: list[str] | None = None,
    ) -> list[AnsweredRow]:
        """Get `n` scored answers to each of the first `size` rows, greedy without `sampling`; bad rows are skipped.

        A row with an UnscoredError is left out and its reason appended to `unscored`; if None, the error is raised.
        """
        found: list[AnsweredRow] = []
        size = min(size or len(source), len(source))
        # one chunk at a time: the processed images of a whole split may not fit in memory
        for start in range(0, size, self._batch_size):
            indices = range(start, min(start + self._batch_size, size))
            rows = {index: row for index in indices if (row := source.get(index)) is not None}
            answered = await self._model.episodes(source, rows, sampling or self._greedy, n=n, seed=(seed, start))
            tasks = {index: row.task for index, row in rows.items()}
            found += answered_rows(source, tasks, answered, unscored=unscored, image_type_key=self._image_type_key)
        return found


class EngineAnswers:
    """A model that answers rows with an engine."""

    def __init__(
        self, engine: Engine, environment: Environment, grading: Grading, max_episode_tokens: int | None = None
    ) -> None:
        self._engine = engine
        self._environment = environment
        self._grading = grading
        self._max_episode_tokens = max_episode_tokens

    async def episodes(
        self, source: PromptSource, rows: Mapping[int, PromptedTask], sampling: Sampling, *, n: int, seed: Seed
    ) -> Sequence[Answered]:
        """Generate and score `n` episodes of each row."""
        unscored = list[str]()
        groups = await collect(
            self._engine,
            Interaction(
                environment=self._environment,
                grading=self._grading,
                renderer=source.renderer,
                max_tokens=self._max_episode_tokens,
                seen_reply=source.seen_reply,
            ),
            list(rows.values()),
            sampling=sampling,
            n=n,
            seed=seed,
            unscored=unscored,
        )
        # no weight sync follows a chunk, which would free its images: those of a whole split would pile up
        engine: object = self._engine
        if isinstance(engine, HoldsImages):
            engine.forget_images()
        # by object identity: two rows of a user's environment may have the same id
        of_task = {id(group.episodes[0].task): group.episodes for group in groups}
        reasons = map(UnscoredError, unscored)
        return [of_task[id(row.task)] if id(row.task) in of_task else next(reasons) for row in rows.values()]


def _accuracies_by(
    rows: Sequence[AnsweredRow], name_of: Callable[[AnsweredRow], str | None]
) -> dict[str, tuple[float, ...]]:
    """Accuracies of the first answers, grouped by `name_of` in sorted order; rows whose name is None are left out."""
    names = sorted({name for name in map(name_of, rows) if name is not None})
    return {name: tuple(row.answers[0].accuracy for row in rows if name_of(row) == name) for name in names}
