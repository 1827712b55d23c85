"""Evaluation of an engine on the rows of a prompt source; the training loop and `fovea eval` both use it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass

from fovea.environments.base import Environment
from fovea.environments.graders.grading import Grading
from fovea.environments.prompt_source import PromptSource
from fovea.errors import ScoreError
from fovea.evaluation.answer import SampledAnswer, sampled_answer
from fovea.rollout.base import Engine
from fovea.rollout.collect import Interaction, collect
from fovea.types import Evaluation, Metrics, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRow:
    """The scored answers to one row of a source."""

    id: str
    """Task id."""
    index: int
    """Position in the source."""
    kind: str
    answers: tuple[SampledAnswer, ...]


class Evaluator:
    """Generates and scores answers to all prompts of a source, by greedy decoding unless sampling is given."""

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        grading: Grading,
        *,
        max_new_tokens: int,
        stop: tuple[str, ...],
        batch_size: int,
        note_unscored: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`note_unscored` is told why `evaluate` left a row out of its averages."""
        self._engine = engine
        self._environment = environment
        self._grading = grading
        self._greedy = Sampling(max_new_tokens=max_new_tokens, temperature=0.0, stop=stop)
        self._batch_size = batch_size
        self._note_unscored = note_unscored

    async def evaluate(self, source: PromptSource, size: int | None = None) -> Evaluation:
        """Greedy accuracies by question type over the first `size` rows; bad rows are skipped.

        Rows without a score are left out and counted; ScoreError where none has one.
        """
        accuracies: dict[str, list[float]] = defaultdict(list)
        unscored = list[str]()
        rows = await self.answers(source, size, unscored=unscored)
        for reason in unscored:
            self._note_unscored(reason)
        check_scored(rows, unscored)
        for row in rows:
            accuracies[row.kind].append(row.answers[0].accuracy)
        return Evaluation(
            accuracies={kind: tuple(accuracies[kind]) for kind in sorted(accuracies)},
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
        """`n` scored answers to each of the first `size` rows, bad rows skipped; greedy without `sampling`.

        A row with an UnscoredError is left out and the reason appended to `unscored`; None: the error is raised.
        """
        indices = range(min(size or len(source), len(source)))
        return [row async for row in self._answers(source, indices, sampling or self._greedy, n, seed, unscored)]

    async def _answers(
        self,
        source: PromptSource,
        indices: Sequence[int],
        sampling: Sampling,
        n: int,
        seed: int,
        unscored: list[str] | None,
    ) -> AsyncIterator[AnsweredRow]:
        # prompts are rendered one chunk at a time, so that the processed images of a whole split are never in memory
        for start in range(0, len(indices), self._batch_size):
            rows = {index: source.get(index) for index in indices[start : start + self._batch_size]}
            usable = {index: row for index, row in rows.items() if row is not None}
            groups = await collect(
                self._engine,
                Interaction(environment=self._environment, grading=self._grading, renderer=source.renderer),
                list(usable.values()),
                sampling=sampling,
                n=n,
                seed=(seed, start),
                unscored=unscored,
            )
            index_of = {row.task.id: index for index, row in usable.items()}
            for group in groups:
                task, answers = group.episodes[0].task, tuple(map(sampled_answer, group.episodes))
                yield AnsweredRow(id=task.id, index=index_of[task.id], kind=task.kind, answers=answers)


def check_scored(rows: Collection[object], unscored: Sequence[str]) -> None:
    """ScoreError where rows were answered and none of them has a score."""
    if unscored and not rows:
        raise ScoreError(f"none of the {len(unscored)} held-out rows could be scored, the last one: {unscored[-1]}")


def dev_metrics(dev: Evaluation) -> Metrics:
    """Accuracies of a dev evaluation as metrics, by question type where there are several."""
    by_kind = {f"accuracy/dev/{kind}": sum(x) / len(x) for kind, x in dev.accuracies.items()}
    accuracies = {"accuracy/dev": dev.accuracy} | (by_kind if len(by_kind) > 1 else {})
    return accuracies | ({"accuracy/dev_unscored": float(dev.num_unscored)} if dev.num_unscored else {})
