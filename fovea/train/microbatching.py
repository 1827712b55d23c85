"""Which groups share a row: about the same work for every row, within a budget. No cut changes the gradient.

The cost of a group is its floating point operations in units of plain text tokens, one token through the linear
layers of the decoder: 1 for each token, more for the attention to those before it, for the head, and for images that
are encoded along.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from fovea.errors import TrainError
from fovea.models.flops import Passes, Work
from fovea.types import Sample, SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A group, or some samples of one that is too large, the prompt repeated."""

    group: SampleGroup
    first_sample: int
    """Where its first sample stands in the batch; the others follow."""

    @property
    def sample_numbers(self) -> range:
        return range(self.first_sample, self.first_sample + len(self.group.samples))

    @property
    def num_tokens(self) -> int:
        """Tokens in a row: the prompt once, and each completion without its last token."""
        return self.group.prompt.num_tokens + sum(len(sample.token_ids_T) - 1 for sample in self.group.samples)


Row: TypeAlias = Sequence[Part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a group costs, in plain text tokens; never less than its tokens."""

    work: Work
    passes: Passes

    def of(self, group: SampleGroup) -> float:
        return self.operations(group) / (self.work.token * self.passes.linear)

    def operations(self, group: SampleGroup) -> float:
        """Floating point operations, the prompt once for all its samples."""
        prompt = group.prompt
        total = self.work.prompt(prompt.num_tokens, prompt.images, self.passes)
        for sample in group.samples:
            total += self.work.completion(len(sample.token_ids_T), prompt.num_tokens, self.passes)
            total += self.work.images(sample.images, self.passes)
        return total


def cut_by_cost(groups: Sequence[SampleGroup], cost: Cost, max_tokens: int) -> list[Row]:
    """Rows of at most `max_tokens` in cost, the dearest as cheap as longest-first makes it.

    A group is split where its tokens do not fit, and only there: a part repeats the prompt and its images. A group
    that fits by its tokens and not by its cost has a row to itself.
    """
    parts = [part for whole in _numbered(groups) for part in _split(whole, max_tokens)]
    costs = [cost.of(part.group) for part in parts]
    return [[parts[index] for index in row] for row in balanced(costs, max_tokens)]


def cut_by_count(groups: Sequence[SampleGroup], groups_per_row: int, max_tokens: int | None = None) -> list[Row]:
    """Rows of so many groups each, in their order; TrainError when one is longer than `max_tokens`."""
    parts = _numbered(groups)
    rows = [parts[start : start + groups_per_row] for start in range(0, len(parts), groups_per_row)]
    longest = max((sum(part.num_tokens for part in row) for row in rows), default=0)
    if max_tokens is not None and longest > max_tokens:
        raise TrainError(
            f"train.variable_seq_lengths=false pads every microbatch to train.max_tokens_per_microbatch={max_tokens} "
            f"tokens, but {groups_per_row} groups hold {longest}; set it to at least {longest}, or lower "
            "train.groups_per_microbatch"
        )
    return list(rows)


def balanced(costs: Sequence[float], budget: float) -> list[list[int]]:
    """Indices by row: as few rows as longest-first can keep within the budget; a larger one stands alone."""
    num_rows = min(len(costs), math.ceil(sum(costs) / budget))
    while True:
        rows = _longest_first(costs, num_rows)
        if all(len(row) == 1 or sum(costs[index] for index in row) <= budget for row in rows):
            return sorted(sorted(row) for row in rows)
        num_rows += 1


def _longest_first(costs: Sequence[float], num_rows: int) -> list[list[int]]:
    """Each in turn, the dearest first, into the row that is cheapest so far (Graham, SIAM J. Appl. Math. 17, 1969).

    The dearest row is then at most 4/3 of what the best cut would make it.
    """
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    cheapest = [(0.0, row) for row in range(num_rows)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        total, row = cheapest[0]
        rows[row].append(index)
        heapq.heapreplace(cheapest, (total + costs[index], row))
    return rows


def _numbered(groups: Sequence[SampleGroup]) -> list[Part]:
    """The groups, each with the number of its first sample."""
    parts: list[Part] = []
    first = 0
    for group in groups:
        parts.append(Part(group=group, first_sample=first))
        first += len(group.samples)
    return parts


def _split(whole: Part, max_tokens: int) -> list[Part]:
    """The group itself, or parts of it that fit, each with the prompt repeated."""
    prompt_tokens = whole.group.prompt.num_tokens
    parts: list[list[Sample]] = [[]]
    size = prompt_tokens
    for sample in whole.group.samples:
        tokens = len(sample.token_ids_T) - 1
        if prompt_tokens + tokens > max_tokens:
            raise TrainError(
                f"a prompt of {prompt_tokens} tokens with a completion of {tokens + 1} does not fit "
                f"train.max_tokens_per_microbatch={max_tokens}; set it to at least {prompt_tokens + tokens}, or lower "
                "rollout.max_new_tokens"
            )
        if parts[-1] and size + tokens > max_tokens:
            parts.append([])
            size = prompt_tokens
        parts[-1].append(sample)
        size += tokens
    groups = [replace(whole.group, samples=tuple(part)) for part in parts]
    return [replace(part, first_sample=part.first_sample + whole.first_sample) for part in _numbered(groups)]
