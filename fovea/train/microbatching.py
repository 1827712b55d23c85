"""Which rank trains on which groups, and which of these share a row: about the same work for each, within a budget.

No cut changes the gradient. All of it follows from the groups alone, so that every rank works out the same for all.

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


def parts_of(groups: Sequence[SampleGroup], max_tokens: int | None = None) -> list[Part]:
    """The groups in order; one whose tokens do not fit is split into parts, which repeat the prompt and its images."""
    numbered = _numbered(groups)
    if max_tokens is None:
        return numbered
    return [part for whole in numbered for part in _split(whole, max_tokens)]


def deal(parts: Sequence[Part], cost: Cost, num_ranks: int) -> list[list[Part]]:
    """Deal the parts to ranks longest-processing-time-first, so that each rank has about the same work.

    A share is in the order of the batch, and empty where there are fewer parts than ranks.
    """
    if num_ranks == 1:
        return [list(parts)]
    shares = _longest_first([cost.of(part.group) for part in parts], num_ranks)
    return [[parts[index] for index in sorted(share)] for share in shares]


def cut_by_cost(parts: Sequence[Part], cost: Cost, max_tokens: int) -> list[Row]:
    """Pack parts into rows under `max_tokens` of cost, balancing the rows longest-processing-time-first.

    A part that fits by its tokens and not by its cost has a row to itself.
    """
    costs = [cost.of(part.group) for part in parts]
    return [[parts[index] for index in row] for row in balanced(costs, max_tokens)]


def cut_by_count(parts: Sequence[Part], groups_per_row: int) -> list[Row]:
    """Rows of so many groups each, in their order."""
    return [parts[start : start + groups_per_row] for start in range(0, len(parts), groups_per_row)]


def check_padding(rows: Sequence[Row], max_tokens: int) -> None:
    """TrainError when a row is longer than the length to which all are padded."""
    longest = max(rows, key=_num_tokens, default=())
    if _num_tokens(longest) > max_tokens:
        raise TrainError(
            f"train.variable_seq_lengths=false pads every microbatch to train.max_tokens_per_microbatch={max_tokens} "
            f"tokens, but {len(longest)} groups hold {_num_tokens(longest)}; set it to at least "
            f"{_num_tokens(longest)}, or lower train.groups_per_microbatch"
        )


def _num_tokens(row: Row) -> int:
    return sum(part.num_tokens for part in row)


def in_step(rows_of_ranks: Sequence[Sequence[Row]], filler: Part) -> list[list[Row]]:
    """Add fillers to the rows of each rank, until all ranks enter the same modules in the same order.

    A sharded module gathers its weights from all ranks whenever it is entered. `filler` is a part without samples, with
    an image if the vision tower is to be entered: it is a row by itself where a rank has fewer rows than another, and
    joins each row that has no image of its own.
    """
    longest = max(map(len, rows_of_ranks), default=0)
    filled = [[*rows, *[[filler]] * (longest - len(rows))] for rows in rows_of_ranks]
    if not filler.group.images:
        return filled
    return [[row if _has_image(row) else [*row, filler] for row in rows] for rows in filled]


def _has_image(row: Row) -> bool:
    return any(part.group.images for part in row)


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
