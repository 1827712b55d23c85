"""Several targets on the same rows: what each said, and the figures made of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fovea.evaluation.answer import SampledAnswer
from fovea.evaluation.evaluator import AnsweredRow
from fovea.evaluation.statistics import (
    Difference,
    Estimate,
    best_of,
    budgets,
    estimate,
    majority,
    paired_difference,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row, as far as it is the same for every target."""

    id: str
    index: int
    """In its split."""
    kind: str
    question: str
    truth: str
    image_type: str | None = None
    """What the row says under evaluate.image_type_key; None: no such key is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All that one target said, by the id of the row."""

    target: str
    greedy: Mapping[str, AnsweredRow]
    samples: Mapping[str, AnsweredRow] = field(default_factory=dict)
    """Several sampled answers to each row; empty where none were asked for."""
    shuffled: Mapping[str, AnsweredRow] = field(default_factory=dict)
    """Greedy answers with another row's images; without the rows that have none, or nobody to swap with."""
    blank: Mapping[str, AnsweredRow] = field(default_factory=dict)
    skipped: Mapping[int, str] = field(default_factory=dict)
    """Index and reason of the rows that this target could not be asked."""
    is_model: bool = True
    """Baselines are none."""

    def accuracy(self, row: Row) -> float:
        return self.greedy[row.id].answers[0].accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Readings, and the rows that all of them have."""

    rows: tuple[Row, ...]
    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Whether the images matter: greedy accuracy with the true ones, another row's, and grey ones, on rows with images.

    A control has fewer rows than there are where a row has nobody to swap with; its difference pairs the rows it has.
    """

    true: Estimate
    shuffled: Estimate
    blank: Estimate
    lost_by_shuffling: Difference
    """True minus shuffled."""
    lost_by_blanking: Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is reported of one target."""

    target: str
    accuracy: Estimate
    """Of greedy answers, as everything below but `pass_at` and `majority`."""
    by_kind: Mapping[str, Estimate]
    by_image_type: Mapping[str, Estimate]
    """Empty without evaluate.image_type_key."""
    versus_first: Difference | None
    """Of this target to the first one; None for the first one itself."""
    versus_first_by_kind: Mapping[str, Difference]
    pass_at: Mapping[int, Estimate]
    """By k; empty where nothing was sampled."""
    majority: Estimate | None
    looks: Looks | None
    """None where no control was read."""
    rows_skipped: int


def figures_of(comparison: Comparison) -> list[Figures]:
    """The figures of every target, over the rows that all of them have."""
    first = comparison.readings[0]
    return [_figures(reading, None if reading is first else first, comparison.rows) for reading in comparison.readings]


def _figures(reading: Reading, first: Reading | None, rows: Sequence[Row]) -> Figures:
    def accuracies(of: Sequence[Row]) -> Estimate:
        return estimate([reading.accuracy(row) for row in of])

    def difference(of: Sequence[Row]) -> Difference:
        assert first is not None, "the first target is compared with nobody"
        return paired_difference([first.accuracy(row) for row in of], [reading.accuracy(row) for row in of])

    by_kind = grouped(rows, lambda row: row.kind)
    sampled = [reading.samples[row.id].answers for row in rows if row.id in reading.samples]
    return Figures(
        target=reading.target,
        accuracy=accuracies(rows),
        by_kind={kind: accuracies(of) for kind, of in by_kind.items()},
        by_image_type={name: accuracies(of) for name, of in grouped(rows, lambda row: row.image_type).items()},
        versus_first=difference(rows) if first else None,
        versus_first_by_kind={kind: difference(of) for kind, of in by_kind.items()} if first else {},
        pass_at=_pass_at(sampled),
        majority=estimate([majority(answers).accuracy for answers in sampled]) if sampled else None,
        looks=_looks(reading, rows) if reading.shuffled or reading.blank else None,
        rows_skipped=len(reading.skipped),
    )


def grouped(rows: Sequence[Row], key: Callable[[Row], str | None]) -> dict[str, list[Row]]:
    """Rows by what `key` says of them, sorted; those of which it says None are in no group."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        name = key(row)
        if name is not None:
            groups[name].append(row)
    return {name: groups[name] for name in sorted(groups)}


def _pass_at(sampled: Sequence[Sequence[SampledAnswer]]) -> dict[int, Estimate]:
    scores = [[answer.accuracy for answer in answers] for answers in sampled]
    ks = budgets(min(map(len, scores), default=0))
    return {k: estimate([best_of(k, of_row) for of_row in scores]) for k in ks}


def _looks(reading: Reading, rows: Sequence[Row]) -> Looks:
    def control(answered: Mapping[str, AnsweredRow]) -> tuple[Estimate, Difference]:
        paired = [row for row in rows if row.id in answered]
        changed = [answered[row.id].answers[0].accuracy for row in paired]
        return estimate(changed), paired_difference(changed, [reading.accuracy(row) for row in paired])

    with_images = [row for row in rows if row.id in reading.shuffled or row.id in reading.blank]
    shuffled, lost_by_shuffling = control(reading.shuffled)
    blank, lost_by_blanking = control(reading.blank)
    return Looks(
        true=estimate([reading.accuracy(row) for row in with_images]),
        shuffled=shuffled,
        blank=blank,
        lost_by_shuffling=lost_by_shuffling,
        lost_by_blanking=lost_by_blanking,
    )
