"""Assignment of groups to packed rows and to ranks, balanced by cost under a token budget.

Losses are normalised by counts of the whole batch, so no assignment changes the gradient. It depends on the groups
only: every rank computes the assignment of all ranks without communication.

The cost of a group is its training FLOPs in units of one text token through the decoder's linear layers: 1 for each
token, plus attention to earlier tokens, the head, and images that are encoded.

Ranks with sharded weights enter every layer together: in each micro-batch, all of them wait for the rank with the most
vision work and then for the rank with the most text. The rows of all ranks are therefore filled together, with text and
vision balanced separately, and similar rows run at the same time.

Axes: `R` bins (rows, or ranks), 2 = cost of text and of vision.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fovea.config.sections import Train
from fovea.errors import TrainError
from fovea.models.flops import Passes, Work
from fovea.types import Metrics, Prompt, PromptImage, Sample, SampleGroup

ImageKeys: TypeAlias = frozenset[str]
T = TypeVar("T")


class CompletionTokens(Protocol):
    """Tokens after a prompt, as the network reads them."""

    @property
    def token_ids_T(self) -> NDArray[np.int64]: ...

    @property
    def mask_T(self) -> NDArray[np.bool_]:
        """True at actions."""

    @property
    def images(self) -> tuple[PromptImage, ...]: ...


C = TypeVar("C", bound=CompletionTokens)


def distinct(continuations: Sequence[C]) -> tuple[list[C], list[int]]:
    """The distinct continuations of one prompt, and the index among them for each given continuation."""
    places: dict[Hashable, int] = {}
    firsts: list[C] = []
    index: list[int] = []
    for each in continuations:
        place = places.setdefault(_key(each), len(firsts))
        if place == len(firsts):
            firsts.append(each)
        index.append(place)
    return firsts, index


def _key(each: CompletionTokens) -> Hashable:
    # the mask belongs to the key: only actions have log-probs
    return each.token_ids_T.tobytes(), each.mask_T.tobytes(), tuple(image.key for image in each.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSlice:
    """A whole group, or consecutive samples of a group that is too large for one row, with a copy of the prompt."""

    group: SampleGroup
    first_sample: int
    """Index of the first sample in the batch; the other samples follow it."""

    @property
    def sample_numbers(self) -> range:
        """Indices of the samples in the batch."""
        return range(self.first_sample, self.first_sample + len(self.group.samples))

    @property
    def num_tokens(self) -> int:
        """Number of tokens in a packed row."""
        # the last token of a completion is predicted and never an input
        samples, _ = distinct(self.group.samples)
        behind = sum(len(sample.token_ids_T) - 1 for sample in samples)
        return self.group.prompt.num_tokens + behind


RowSlices: TypeAlias = Sequence[GroupSlice]
"""The slices that share one packed row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost model of a forward and backward pass, in units of one text token through the decoder's linear layers."""

    work: Work
    passes: Passes

    def of(self, group: SampleGroup) -> float:
        """Cost of a group; never less than its number of tokens."""
        return self.flops(group) / (self.work.token * self.passes.linear)

    def vision(self, group: SampleGroup) -> float:
        """The vision tower's part of the cost; 0 if features are cached."""
        later = (image for sample in distinct(group.samples)[0] for image in sample.images)
        return self.work.images((*group.prompt.images, *later), self.passes) / (self.work.token * self.passes.linear)

    def flops(self, group: SampleGroup) -> float:
        """FLOPs of a group; the prompt is counted once for all samples, and equal samples are counted once."""
        prompt = group.prompt
        total = self.work.prompt(prompt.num_tokens, prompt.images, self.passes)
        for sample in distinct(group.samples)[0]:
            total += self.work.completion(len(sample.token_ids_T), prompt.num_tokens, self.passes)
            total += self.work.images(sample.images, self.passes)
        return total


def slice_groups(groups: Sequence[SampleGroup], max_tokens: int | None = None) -> list[GroupSlice]:
    """Slices in the order of the groups; a group above `max_tokens` is split, each slice repeating prompt and images.

    TrainError when a prompt with a single completion exceeds `max_tokens`.
    """
    numbered = _numbered(groups)
    if max_tokens is None:
        return numbered
    return [each for whole in numbered for each in _split(whole, max_tokens)]


def pack_by_cost(slices: Sequence[GroupSlice], cost: Cost, max_tokens: int) -> list[RowSlices]:
    """Pack groups into micro-batches under `max_tokens`, balancing cost longest-processing-time-first.

    `max_tokens` limits the cost of a row, which is at least its number of tokens. A slice above it gets a row to
    itself.
    """
    costs = [cost.of(each.group) for each in slices]
    return [[slices[index] for index in row] for row in balanced_bins(costs, max_tokens)]


def pack_by_count(slices: Sequence[GroupSlice], groups_per_row: int) -> list[RowSlices]:
    """Pack a fixed number of groups into each row, in the order of the batch."""
    return [slices[start : start + groups_per_row] for start in range(0, len(slices), groups_per_row)]


def balanced_bins(costs: Sequence[float], budget: float) -> list[list[int]]:
    """Indices of costs by bin: the fewest bins that fit the budget, longest first; a larger cost gets its own bin."""
    # start with the fewest bins that can hold the sum; the loop ends, at the latest, with one cost per bin
    num_rows = min(len(costs), math.ceil(sum(costs) / budget))
    while True:
        rows = _longest_first(costs, num_rows)
        if all(len(row) == 1 or sum(costs[index] for index in row) <= budget for row in rows):
            return sorted(sorted(row) for row in rows)
        num_rows += 1


def _longest_first(costs: Sequence[float], num_rows: int) -> list[list[int]]:
    """Indices of costs by row, the longest first (Graham, SIAM J. Appl. Math. 17, 1969): at most 4/3 of the optimum."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    # a heap of (cost so far, row): ties go to the lower row, so every rank gets the same result
    cheapest = [(0.0, row) for row in range(num_rows)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        total, row = cheapest[0]
        rows[row].append(index)
        heapq.heapreplace(cheapest, (total + costs[index], row))
    return rows


def _numbered(groups: Sequence[SampleGroup]) -> list[GroupSlice]:
    """One slice for each whole group, with the index of its first sample."""
    slices: list[GroupSlice] = []
    first = 0
    for group in groups:
        slices.append(GroupSlice(group=group, first_sample=first))
        first += len(group.samples)
    return slices


def _split(whole: GroupSlice, max_tokens: int) -> list[GroupSlice]:
    """Slices of a group under `max_tokens`, filled in the order of its samples."""
    prompt_tokens = whole.group.prompt.num_tokens
    parts: list[list[Sample]] = [[]]
    size = prompt_tokens
    _, index = distinct(whole.group.samples)
    in_part: set[int] = set()
    for sample, number in zip(whole.group.samples, index, strict=True):
        tokens = len(sample.token_ids_T) - 1
        if prompt_tokens + tokens > max_tokens:
            raise TrainError(
                f"a prompt of {prompt_tokens} tokens with a completion of {tokens + 1} does "
                f"not fit train.max_tokens_per_microbatch={max_tokens}; set it to at least {prompt_tokens + tokens}, "
                "or lower rollout.max_new_tokens"
            )
        # a sample that equals one in the part takes no tokens
        if parts[-1] and number not in in_part and size + tokens > max_tokens:
            parts.append([])
            size, in_part = prompt_tokens, set()
        parts[-1].append(sample)
        size += tokens * (number not in in_part)
        in_part.add(number)
    groups = [replace(whole.group, samples=tuple(each)) for each in parts]
    return [replace(each, first_sample=each.first_sample + whole.first_sample) for each in _numbered(groups)]


def rows_by_cost(slices: Sequence[GroupSlice], cost: Cost, num_ranks: int, max_tokens: int) -> list[list[RowSlices]]:
    """The fewest rows per rank whose cost is within `max_tokens`; a slice above it gets a row to itself."""
    if num_ranks == 1:
        return [pack_by_cost(slices, cost, max_tokens)]
    parts = [_parts(each, cost) for each in slices]
    rows_per_rank = max(1, math.ceil(sum(map(sum, parts)) / (num_ranks * max_tokens)))
    while True:
        bins = _assign(parts, num_ranks * rows_per_rank)
        if all(len(each) <= 1 or sum(sum(parts[index]) for index in each) <= max_tokens for each in bins):
            break
        rows_per_rank += 1
    filled = [sorted(each) for each in bins if each]
    filled.sort(key=lambda each: _sums([parts[index] for index in each])[::-1], reverse=True)
    rows = [[slices[index] for index in each] for each in filled]
    return [list(rows[rank::num_ranks]) for rank in range(num_ranks)]


def rows_by_count(
    slices: Sequence[GroupSlice], cost: Cost, num_ranks: int, groups_per_row: int
) -> list[list[RowSlices]]:
    """Rows of each rank with a fixed number of groups, in the order of the batch; ranks have about the same cost."""
    shares = _assign([_parts(each, cost) for each in slices], num_ranks)
    return [pack_by_count([slices[index] for index in sorted(share)], groups_per_row) for share in shares]


def align_ranks(rows_of_ranks: Sequence[Sequence[RowSlices]], dummy: GroupSlice) -> list[list[RowSlices]]:
    """Add dummy slices until all ranks have the same number of rows, each with an image if the dummy has one.

    `dummy` is a slice without samples. It adds nothing to the loss.
    """
    # FSDP2 all-gathers the weights of a module whenever a rank enters it: a rank that skipped a row, or the vision
    # tower in a row of text, would leave the others waiting
    longest = max(map(len, rows_of_ranks), default=0)
    filled = [[*rows, *[[dummy]] * (longest - len(rows))] for rows in rows_of_ranks]
    if not dummy.group.images:
        return filled
    return [[row if any(each.group.images for each in row) else [*row, dummy] for row in rows] for rows in filled]


def slices_of(group: SampleGroup, rows_of_ranks: Sequence[Sequence[RowSlices]]) -> list[list[RowSlices]]:
    """The rows of each rank, reduced to the slices of one group."""
    kept = [
        [[each for each in row if each.group.samples[0] in group.samples] for row in rows] for rows in rows_of_ranks
    ]
    return [[row for row in rows if row] for rows in kept]


def imbalance(rows_of_ranks: Sequence[Sequence[RowSlices]], cost: Cost) -> float:
    """Work of the slowest rank over the mean of all ranks, where vision and text of each micro-batch count separately.

    1 if no rank ever waits for another. All ranks must have the same number of rows (`align_ranks`).
    """
    parts = [[_row_parts(row, cost) for row in rows] for rows in rows_of_ranks]
    together = list(zip(*parts, strict=True))
    slowest = sum(max(text for text, _ in of_ranks) + max(vision for _, vision in of_ranks) for of_ranks in together)
    total = sum(sum(part) for of_ranks in together for part in of_ranks)
    return slowest * len(parts) / total if total else 1.0


def unevenness(rows_of_ranks: Sequence[Sequence[RowSlices]], cost: Cost) -> float:
    """Cost of the most expensive row over the mean of all ranks' rows; 1 if all micro-batches cost the same."""
    costs = [sum(_row_parts(row, cost)) for rows in rows_of_ranks for row in rows]
    return max(costs) * len(costs) / sum(costs) if sum(costs) else 1.0


Parts = tuple[float, float]
"""Cost of text and of vision."""


def _parts(each: GroupSlice, cost: Cost) -> Parts:
    vision = cost.vision(each.group)
    return cost.of(each.group) - vision, vision


def _row_parts(row: RowSlices, cost: Cost) -> Parts:
    return _sums([_parts(each, cost) for each in row])


def _sums(parts: Sequence[Parts]) -> Parts:
    return sum(text for text, _ in parts), sum(vision for _, vision in parts)


def _assign(parts: Sequence[Parts], num_bins: int) -> list[list[int]]:
    """Indices by bin: the most expensive first, each into the bin where the largest text and vision costs rise least.

    With one kind of cost it is the longest-processing-time-first rule (Graham, SIAM J. Appl. Math. 17, 1969), whose
    largest bin costs at most 4/3 of the optimum.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads_2R = np.zeros((2, num_bins))
    for index in sorted(range(len(parts)), key=lambda index: -sum(parts[index])):
        after_2R = loads_2R + np.array(parts[index])[:, None]
        rise_R = np.maximum(after_2R, loads_2R.max(axis=1, keepdims=True)).sum(axis=0)
        # ties go to the emptiest bin, then to the first, so every rank gets the same result
        equals = np.flatnonzero(rise_R == rise_R.min())
        chosen = int(equals[after_2R[:, equals].sum(axis=0).argmin()])
        bins[chosen].append(index)
        loads_2R[:, chosen] = after_2R[:, chosen]
    return bins


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAssignment:
    """Assigns groups to rows and ranks for the passes of one model."""

    train: Train
    cost: Cost
    num_ranks: int
    image_token_id: int
    shards_tower: bool
    """True if all ranks must run the vision tower together: a row without an image then gets a dummy's image."""

    def rows_of_ranks(
        self,
        groups: Sequence[SampleGroup],
        max_tokens: int,
        only: SampleGroup | None = None,
        *,
        groups_per_row: int | None = None,
    ) -> list[list[RowSlices]]:
        """Rows of each rank, the same number on all, of at most `max_tokens` if the train settings limit them.

        `groups_per_row` replaces `train.groups_per_microbatch`, which leaves every image on its rank. With `only`, only
        the slices of that group remain, each on the rank that it has among all groups.
        """
        if self.train.enable_dynamic_batch_size:
            rows = rows_by_cost(slice_groups(groups, max_tokens), self.cost, self.num_ranks, max_tokens)
        else:
            count = groups_per_row or self.train.groups_per_microbatch
            rows = rows_by_count(slice_groups(groups), self.cost, self.num_ranks, count)
        rows = rows if only is None else slices_of(only, rows)
        return align_ranks(rows, GroupSlice(group=SampleGroup(prompt=self._dummy(groups), samples=()), first_sample=0))

    def balance(self, groups: Sequence[SampleGroup], max_tokens: int) -> Metrics:
        """Metrics of how evenly the work on these groups is divided among ranks, and among all micro-batches."""
        rows = self.rows_of_ranks(groups, max_tokens)
        return {"balance/ranks": imbalance(rows, self.cost), "balance/microbatches": unevenness(rows, self.cost)}

    def tokens_for(self, groups: Sequence[SampleGroup], limit_tokens: int) -> int:
        """Token limit for these groups: `limit_tokens`, or more where their longest completion needs it."""
        return max(limit_tokens, min(self.train.max_tokens_per_microbatch, unsplittable_tokens(groups)))

    def images_of_ranks(self, groups: Sequence[SampleGroup], limit_tokens: int) -> list[ImageKeys]:
        """Keys of the images in each rank's rows, including the dummy's image."""
        rows_of_ranks = self.rows_of_ranks(groups, self.tokens_for(groups, limit_tokens))
        of_dummy = _keys(self._dummy(groups).images)
        return [
            of_dummy | _keys(image for row in rows for each in row for image in each.group.images)
            for rows in rows_of_ranks
        ]

    def images_to_imitate(self, prompts: Sequence[Prompt]) -> list[ImageKeys]:
        """Keys of the images of each rank's prompts in a step of supervised fine-tuning, including the dummy's."""
        images = [image for prompt in prompts for image in prompt.images] if self.shards_tower else []
        of_dummy = _keys(dummy_prompt(images, self.image_token_id).images)
        return [
            of_dummy | _keys(image for prompt in share for image in prompt.images)
            for share in round_robin(prompts, self.num_ranks)
        ]

    def _dummy(self, groups: Sequence[SampleGroup]) -> Prompt:
        images = [image for group in groups for image in group.images] if self.shards_tower else []
        return dummy_prompt(images, self.image_token_id)


def unsplittable_tokens(groups: Sequence[SampleGroup]) -> int:
    """Tokens of the longest completion with its prompt: the smallest limit that the groups can be packed under."""
    return max(
        (group.prompt.num_tokens + len(sample.token_ids_T) - 1 for group in groups for sample in group.samples),
        default=0,
    )


def tokens_beside_engine(groups: Sequence[SampleGroup], limit_tokens: int) -> int:
    """Token limit for passes while the engine is awake: the largest group, with its prompt counted once."""
    tokens = (group.prompt.num_tokens + sum(len(s.token_ids_T) for s in group.samples) for group in groups)
    return min(limit_tokens, max(tokens, default=0))


def round_robin(examples: Sequence[T], num_ranks: int) -> list[Sequence[T]]:
    """Examples of each rank in a step of supervised fine-tuning."""
    return [examples[rank::num_ranks] for rank in range(num_ranks)]


def dummy_prompt(images: Sequence[PromptImage], image_token_id: int) -> Prompt:
    """Prompt of one text token and the smallest of these images, if there are any."""
    # an image of the batch rather than a made-up one, since image tensors differ by family
    chosen = sorted(images, key=lambda image: image.num_tokens)[:1]
    ids = np.array([0] + [image_token_id] * sum(image.num_tokens for image in chosen))
    return Prompt(token_ids_L=ids, unexpanded_ids_U=ids, images=tuple(chosen))


def _keys(images: Iterable[PromptImage]) -> ImageKeys:
    return frozenset(image.key for image in images)
