"""Assignment of groups to packed rows, balanced by cost under a token budget.

Losses are normalised by counts of the whole batch, so no assignment changes the gradient. It depends on the groups
only: every rank computes the assignment of all ranks without communication.

The cost of a group is its training FLOPs in units of one text token through the decoder's linear layers: 1 for each
token, plus attention to earlier tokens, the head, and images that are encoded.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fovea.errors import TrainError
from fovea.models.flops import Passes, Work
from fovea.types import PromptImage, Sample, SampleGroup


class Continuing(Protocol):
    """Tokens behind a prompt, as the network reads them."""

    @property
    def token_ids_T(self) -> NDArray[np.int64]: ...

    @property
    def mask_T(self) -> NDArray[np.bool_]:
        """True at actions."""

    @property
    def images(self) -> tuple[PromptImage, ...]: ...


C = TypeVar("C", bound=Continuing)


def distinct(continuations: Sequence[C]) -> tuple[list[C], list[int]]:
    """The first of each set of equal continuations of one prompt, and the index of each continuation's among them."""
    places: dict[Hashable, int] = {}
    firsts: list[C] = []
    index: list[int] = []
    for each in continuations:
        place = places.setdefault(_key(each), len(firsts))
        if place == len(firsts):
            firsts.append(each)
        index.append(place)
    return firsts, index


def _key(each: Continuing) -> Hashable:
    # the mask, too: only actions have log-probs
    return each.token_ids_T.tobytes(), each.mask_T.tobytes(), tuple(image.key for image in each.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSlice:
    """A whole group, or consecutive samples of a group that is too large for one row, with a copy of the prompt."""

    group: SampleGroup
    first_sample: int
    """Index in the batch of the first sample; the others follow it there."""

    @property
    def sample_numbers(self) -> range:
        """Indices of the samples in the batch."""
        return range(self.first_sample, self.first_sample + len(self.group.samples))

    @property
    def num_tokens(self) -> int:
        """Number of tokens in a packed row."""
        # the last token of a completion is predicted and never an input
        samples, _ = distinct(self.group.samples)
        return self.group.prompt.num_tokens + sum(len(sample.token_ids_T) - 1 for sample in samples)


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
        """The part of the cost that is the vision tower's; 0 where features are cached."""
        later = (image for sample in distinct(group.samples)[0] for image in sample.images)
        return self.work.images((*group.prompt.images, *later), self.passes) / (self.work.token * self.passes.linear)

    def flops(self, group: SampleGroup) -> float:
        """FLOPs of a group, with one pass over the prompt for all its samples, and one over equal samples."""
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

    The budget is one of cost, which is at least the number of tokens. A slice whose cost by itself exceeds it gets a
    row to itself.
    """
    costs = [cost.of(each.group) for each in slices]
    return [[slices[index] for index in row] for row in balanced_bins(costs, max_tokens)]


def pack_by_count(slices: Sequence[GroupSlice], groups_per_row: int) -> list[RowSlices]:
    """Pack a fixed number of groups into each row, in the order of the batch."""
    return [slices[start : start + groups_per_row] for start in range(0, len(slices), groups_per_row)]


def check_padding(rows: Sequence[RowSlices], max_tokens: int) -> None:
    """Raise TrainError if a row is longer than `max_tokens`, the length to which all rows are padded."""
    longest = max(rows, key=_num_tokens, default=())
    if _num_tokens(longest) > max_tokens:
        raise TrainError(
            f"train.variable_seq_lengths=false pads every microbatch to train.max_tokens_per_microbatch={max_tokens} "
            f"tokens, but {len(longest)} groups hold {_num_tokens(longest)}; set it to at least "
            f"{_num_tokens(longest)}, or lower train.groups_per_microbatch"
        )


def _num_tokens(row: RowSlices) -> int:
    return sum(each.num_tokens for each in row)


def balanced_bins(costs: Sequence[float], budget: float) -> list[list[int]]:
    """Indices of costs by bin: the fewest bins with which longest-processing-time-first stays within the budget.

    A cost above the budget gets a bin to itself.
    """
    # no fewer bins can hold the sum; adding one at a time ends, at the latest, with one cost to each bin
    num_rows = min(len(costs), math.ceil(sum(costs) / budget))
    while True:
        rows = _longest_first(costs, num_rows)
        if all(len(row) == 1 or sum(costs[index] for index in row) <= budget for row in rows):
            return sorted(sorted(row) for row in rows)
        num_rows += 1


def _longest_first(costs: Sequence[float], num_rows: int) -> list[list[int]]:
    """Indices of costs by row, by the longest-processing-time-first rule (Graham, SIAM J. Appl. Math. 17, 1969).

    The largest row costs at most 4/3 of the optimum.
    """
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    # a heap of (cost so far, row): ties go to the lower row on every rank alike
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
                f"a prompt of {prompt_tokens} tokens with a completion of {tokens + 1} does not fit "
                f"train.max_tokens_per_microbatch={max_tokens}; set it to at least {prompt_tokens + tokens}, or lower "
                "rollout.max_new_tokens"
            )
        # a sample that equals one of the part takes no tokens
        if parts[-1] and number not in in_part and size + tokens > max_tokens:
            parts.append([])
            size, in_part = prompt_tokens, set()
        parts[-1].append(sample)
        size += tokens * (number not in in_part)
        in_part.add(number)
    groups = [replace(whole.group, samples=tuple(each)) for each in parts]
    return [replace(each, first_sample=each.first_sample + whole.first_sample) for each in _numbered(groups)]
