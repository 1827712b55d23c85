"""Answers of several targets to the same rows, and the metrics computed from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fovea.evaluation.records import AnsweredRow, RecordedEpisode, TaskRow
from fovea.evaluation.statistics import Difference, best_of, budgets, majority, paired_difference, parts_of
from fovea_gym.benchmarks.estimates import Estimate, estimate, mean_estimate

if TYPE_CHECKING:  # it imports torch, which pages and summaries do without
    from fovea.models.processor import BannedTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetAnswers:
    """All answers of one target, by row id."""

    name: str
    greedy: Mapping[str, AnsweredRow]
    samples: Mapping[str, AnsweredRow] = field(default_factory=dict)
    """Several sampled answers per row; empty with `evaluate.samples_per_prompt=0`."""
    shuffled: Mapping[str, AnsweredRow] = field(default_factory=dict)
    """Greedy answers with another row's images; rows without images, or without a partner to swap with, are absent."""
    blank: Mapping[str, AnsweredRow] = field(default_factory=dict)
    """Greedy answers with grey images."""
    shuffled_dependence: Mapping[str, float] = field(default_factory=dict)
    """Nats per token by which each greedy answer is likelier with its true images than with shuffled ones."""
    blank_dependence: Mapping[str, float] = field(default_factory=dict)
    """The same for blank images."""
    skipped: Mapping[int, str] = field(default_factory=dict)
    """Reason by index of the rows that this target could not answer."""
    unscored: tuple[str, ...] = ()
    """Reasons why rows were left out whose grader gave no score for this target's greedy answer."""
    is_model: bool = True
    """False for baselines."""
    banned: BannedTokens | None = None
    """Tokens that the model could not draw; None for baselines."""

    def accuracy(self, row: TaskRow) -> float:
        return self.greedy[row.id].answers[0].accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResults:
    """Answers of all targets, and the rows that every target answered."""

    rows: tuple[TaskRow, ...]
    targets: tuple[TargetAnswers, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageAblation:
    """Greedy accuracy with the true images, another row's (shuffled) and grey ones (blank), on rows with images.

    The shuffled control lacks rows without a partner to swap with; its difference is over the rows that it has.
    """

    true: Estimate
    shuffled: Estimate
    blank: Estimate
    lost_by_shuffling: Difference
    """Accuracy with the true images minus that with shuffled ones, paired by row."""
    lost_by_blanking: Difference
    """The same for blank images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureDependence:
    """How much likelier a token of the greedy answers is with the true images, in nats: the mean over rows."""

    shuffled: Estimate
    blank: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetMetrics:
    """Metrics of one target. All but `pass_at` and `majority` are of greedy answers."""

    target: str
    accuracy: Estimate
    by_kind: Mapping[str, Estimate]
    by_image_type: Mapping[str, Estimate]
    """Empty without evaluate.image_type_key."""
    reward: Estimate
    parts: Mapping[str, Estimate]
    """Each named part of the reward, over the rows that have it."""
    versus_first: Difference | None
    """Accuracy minus that of the first target; None for the first target itself."""
    versus_first_by_kind: Mapping[str, Difference]
    pass_at: Mapping[int, Estimate]
    """pass@k by k; empty without sampled answers."""
    majority: Estimate | None
    """Accuracy of the majority vote over the sampled answers; None without them."""
    image_ablation: ImageAblation | None
    """None where no control was run."""
    picture_dependence: PictureDependence | None
    """None where no control was run, and of servers, which give no log-probs of given tokens."""
    rows_skipped: int
    rows_unscored: int
    """Rows left out because their grader gave no score."""


def target_metrics(results: EvalResults) -> list[TargetMetrics]:
    """Metrics of every target over the rows that all of them answered."""
    first = results.targets[0]
    return [_target_metrics(target, None if target is first else first, results.rows) for target in results.targets]


def _target_metrics(target: TargetAnswers, first: TargetAnswers | None, rows: Sequence[TaskRow]) -> TargetMetrics:
    def accuracies(of: Sequence[TaskRow]) -> Estimate:
        return estimate([target.accuracy(row) for row in of])

    def difference(of: Sequence[TaskRow]) -> Difference:
        assert first is not None, "the first target is the reference of all differences"
        return paired_difference([first.accuracy(row) for row in of], [target.accuracy(row) for row in of])

    greedy = [target.greedy[row.id].answers[0] for row in rows]
    by_kind = grouped(rows, lambda row: row.kind)
    sampled = [target.samples[row.id].answers for row in rows if row.id in target.samples]
    return TargetMetrics(
        target=target.name,
        accuracy=accuracies(rows),
        by_kind={kind: accuracies(of) for kind, of in by_kind.items()},
        by_image_type={name: accuracies(of) for name, of in grouped(rows, lambda row: row.image_type).items()},
        reward=mean_estimate([answer.reward for answer in greedy]),
        parts={name: mean_estimate(values) for name, values in parts_of(greedy).items()},
        versus_first=difference(rows) if first else None,
        versus_first_by_kind={kind: difference(of) for kind, of in by_kind.items()} if first else {},
        pass_at=_pass_at(sampled),
        majority=estimate([majority(answers).accuracy for answers in sampled]) if sampled else None,
        image_ablation=_image_ablation(target, rows) if target.shuffled or target.blank else None,
        picture_dependence=_picture_dependence(target, rows),
        rows_skipped=len(target.skipped),
        rows_unscored=len(target.unscored),
    )


def grouped(rows: Sequence[TaskRow], key: Callable[[TaskRow], str | None]) -> dict[str, list[TaskRow]]:
    """Rows grouped by `key`, groups in sorted order; rows whose key is None are left out."""
    groups: dict[str, list[TaskRow]] = defaultdict(list)
    for row in rows:
        name = key(row)
        if name is not None:
            groups[name].append(row)
    return {name: groups[name] for name in sorted(groups)}


def _pass_at(sampled: Sequence[Sequence[RecordedEpisode]]) -> dict[int, Estimate]:
    scores = [[answer.accuracy for answer in answers] for answers in sampled]
    ks = budgets(min(map(len, scores), default=0))
    return {k: estimate([best_of(k, of_row) for of_row in scores]) for k in ks}


def _picture_dependence(target: TargetAnswers, rows: Sequence[TaskRow]) -> PictureDependence | None:
    def mean(of_rows: Mapping[str, float]) -> Estimate:
        return mean_estimate([of_rows[row.id] for row in rows if row.id in of_rows])

    if not target.blank_dependence:
        return None
    return PictureDependence(shuffled=mean(target.shuffled_dependence), blank=mean(target.blank_dependence))


def _image_ablation(target: TargetAnswers, rows: Sequence[TaskRow]) -> ImageAblation:
    def control(answered: Mapping[str, AnsweredRow]) -> tuple[Estimate, Difference]:
        paired = [row for row in rows if row.id in answered]
        changed = [answered[row.id].answers[0].accuracy for row in paired]
        return estimate(changed), paired_difference(changed, [target.accuracy(row) for row in paired])

    with_images = [row for row in rows if row.id in target.shuffled or row.id in target.blank]
    shuffled, lost_by_shuffling = control(target.shuffled)
    blank, lost_by_blanking = control(target.blank)
    return ImageAblation(
        true=estimate([target.accuracy(row) for row in with_images]),
        shuffled=shuffled,
        blank=blank,
        lost_by_shuffling=lost_by_shuffling,
        lost_by_blanking=lost_by_blanking,
    )
