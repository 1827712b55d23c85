"""The answers of several targets to the same rows, and the metrics computed from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fovea.evaluation.records import AnsweredRow, RecordedEpisode, TaskRow
from fovea.evaluation.statistics import Difference, best_of, budgets, majority, paired_difference, parts_of
from fovea_gym.benchmarks.estimates import Estimate, estimate, mean_estimate

if TYPE_CHECKING:  # it imports torch, which pages and summaries do not need
    from fovea.models.processor import BannedTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetAnswers:
    """All answers of one evaluated target, by row id."""

    name: str
    greedy: Mapping[str, AnsweredRow]
    samples: Mapping[str, AnsweredRow] = field(default_factory=dict)
    """Sampled answers, several per row; empty with `evaluate.samples_per_prompt=0`."""
    shuffled: Mapping[str, AnsweredRow] = field(default_factory=dict)
    """Greedy answers with another row's images; lacks rows without images or without a partner to swap with."""
    blank: Mapping[str, AnsweredRow] = field(default_factory=dict)
    """Greedy answers with grey images; lacks rows without images."""
    shuffled_dependence: Mapping[str, float] = field(default_factory=dict)
    """Nats per token by which each greedy answer is likelier with the true images than with shuffled ones."""
    blank_dependence: Mapping[str, float] = field(default_factory=dict)
    """Nats per token by which each greedy answer is likelier with the true images than with blank ones."""
    skipped: Mapping[int, str] = field(default_factory=dict)
    """Rows that this target could not answer: the reason by row index."""
    unscored: tuple[str, ...] = ()
    """Reasons for the rows that were left out because the grader could not score this target's greedy answer."""
    is_model: bool = True
    """False if the target is a baseline."""
    banned: BannedTokens | None = None
    """Tokens that the model was not allowed to sample; None for baselines."""

    def accuracy(self, row: TaskRow) -> float:
        return self.greedy[row.id].answers[0].accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResults:
    """The answers of all targets, and the rows that every target answered."""

    rows: tuple[TaskRow, ...]
    targets: tuple[TargetAnswers, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageAblation:
    """Greedy accuracy with the true images, with another row's (shuffled) and with grey ones (blank).

    It covers rows with images. Shuffled accuracy and difference lack rows without a partner to swap images with.
    """

    true: Estimate
    shuffled: Estimate
    blank: Estimate
    lost_by_shuffling: Difference
    """Accuracy with the true images minus accuracy with shuffled ones, paired by row."""
    lost_by_blanking: Difference
    """Accuracy with the true images minus accuracy with blank ones, paired by row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureDependence:
    """How much likelier a greedy answer is with the true images, in nats per token: means over rows."""

    shuffled: Estimate
    blank: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetMetrics:
    """Metrics of one target. All but `pass_at` and `majority` are computed from greedy answers."""

    target: str
    accuracy: Estimate
    by_kind: Mapping[str, Estimate]
    by_image_type: Mapping[str, Estimate]
    """Accuracy by image type; empty without `evaluate.image_type_key`."""
    reward: Estimate
    parts: Mapping[str, Estimate]
    """Mean of each named part of the reward, over the rows that have it."""
    versus_first: Difference | None
    """Accuracy minus the first target's accuracy; None for the first target itself."""
    versus_first_by_kind: Mapping[str, Difference]
    pass_at: Mapping[int, Estimate]
    """pass@k for each k; empty without sampled answers."""
    majority: Estimate | None
    """Accuracy of the majority vote over the sampled answers; None without them."""
    image_ablation: ImageAblation | None
    """Accuracies with changed images; None if no ablation was run."""
    picture_dependence: PictureDependence | None
    """Dependence on images; None without an ablation, and for servers, which cannot score given tokens."""
    rows_skipped: int
    rows_unscored: int
    """Number of rows left out because their grader could not score them."""


def target_metrics(results: EvalResults) -> list[TargetMetrics]:
    """Compute the metrics of every target over the rows that all targets answered."""
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
    """Group rows by `key`, in sorted order of the keys; rows whose key is None are left out."""
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
