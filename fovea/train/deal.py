"""Who trains on what: the passes of an update, the rows of every rank in each, and the images that these hold.

All of it follows from lengths, sizes of images and counters. So every rank knows the rows of all, and the driver sends
each rank the pixels of its own rows only (decision 014).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np

from fovea.config.run import Algorithm, Train
from fovea.train.microbatching import Cost, GroupSlice, RowSlices, slice_groups
from fovea.train.rank_assignment import align_ranks, imbalance, rows_by_cost, rows_by_count, slices_of, unevenness
from fovea.types import Batch, Metrics, Prompt, PromptImage, SampleGroup

ImageKeys: TypeAlias = frozenset[str]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """How passes of one model over some groups are dealt to the ranks."""

    train: Train
    cost: Cost
    num_ranks: int
    image_token_id: int
    shards_tower: bool
    """All ranks must run the vision tower together, so that a row without an image gets that of a dummy."""

    def rows_of_ranks(
        self, groups: Sequence[SampleGroup], max_tokens: int, only: SampleGroup | None = None
    ) -> list[list[RowSlices]]:
        """Rows of each rank, as many for every one, of at most `max_tokens` where the train settings limit them.

        With `only`, no more than that group's slices remain, each on the rank that has it among all groups.
        """
        if self.train.enable_dynamic_batch_size:
            rows = rows_by_cost(slice_groups(groups, max_tokens), self.cost, self.num_ranks, max_tokens)
        else:
            rows = rows_by_count(slice_groups(groups), self.cost, self.num_ranks, self.train.groups_per_microbatch)
        rows = rows if only is None else slices_of(only, rows)
        return align_ranks(rows, GroupSlice(group=SampleGroup(prompt=self._dummy(groups), samples=()), first_sample=0))

    def balance(self, groups: Sequence[SampleGroup], max_tokens: int) -> Metrics:
        """How evenly the work of passes over these groups is divided among ranks, and among all micro-batches."""
        rows = self.rows_of_ranks(groups, max_tokens)
        return {"balance/ranks": imbalance(rows, self.cost), "balance/microbatches": unevenness(rows, self.cost)}

    def tokens_for(self, groups: Sequence[SampleGroup], limit_tokens: int) -> int:
        """Largest micro-batch of these groups; a limit below the settings' gives way to their longest completion."""
        return max(limit_tokens, min(self.train.max_tokens_per_microbatch, unsplittable_tokens(groups)))

    def images_of_ranks(self, groups: Sequence[SampleGroup], limit_tokens: int) -> list[ImageKeys]:
        """Keys of the images in each rank's rows, that of the dummy among them."""
        rows_of_ranks = self.rows_of_ranks(groups, self.tokens_for(groups, limit_tokens))
        of_dummy = _keys(self._dummy(groups).images)
        return [
            of_dummy | _keys(image for row in rows for each in row for image in each.group.images)
            for rows in rows_of_ranks
        ]

    def images_to_imitate(self, prompts: Sequence[Prompt]) -> list[ImageKeys]:
        """Keys of the images of each rank's prompts in a step of supervised fine-tuning, and of the dummy's."""
        images = [image for prompt in prompts for image in prompt.images] if self.shards_tower else []
        of_dummy = _keys(dummy_prompt(images, self.image_token_id).images)
        return [
            of_dummy | _keys(image for prompt in share for image in prompt.images)
            for share in deal_in_turn(prompts, self.num_ranks)
        ]

    def _dummy(self, groups: Sequence[SampleGroup]) -> Prompt:
        images = [image for group in groups for image in group.images] if self.shards_tower else []
        return dummy_prompt(images, self.image_token_id)


def unsplittable_tokens(groups: Sequence[SampleGroup]) -> int:
    """Tokens of the longest completion with its prompt, less than which no micro-batch of the groups can have."""
    return max(
        (group.prompt.num_tokens + len(sample.token_ids_T) - 1 for group in groups for sample in group.samples),
        default=0,
    )


def largest_group_tokens(groups: Sequence[SampleGroup]) -> int:
    """Tokens of the group that has the most, its prompt counted once."""
    return max(
        (group.prompt.num_tokens + sum(len(s.token_ids_T) for s in group.samples) for group in groups), default=0
    )


def deal_in_turn(examples: Sequence[T], num_ranks: int) -> list[Sequence[T]]:
    """Examples of each rank in a step of supervised fine-tuning."""
    return [examples[rank::num_ranks] for rank in range(num_ranks)]


def dummy_prompt(images: Sequence[PromptImage], image_token_id: int) -> Prompt:
    """Prompt of one text token and the smallest of these images, if there are any."""
    # an image of the batch and no made-up one: the tensors of an image differ by family
    chosen = sorted(images, key=lambda image: image.num_tokens)[:1]
    ids = np.array([0] + [image_token_id] * sum(image.num_tokens for image in chosen))
    return Prompt(token_ids_L=ids, unexpanded_ids_U=ids, images=tuple(chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Passes of the update of one step."""

    algorithm: Algorithm
    plain_update_every_steps: int
    step: int
    """Updates before it."""

    @property
    def is_plain(self) -> bool:
        """True if it reuses no activations, and compares the log-probs of all groups with the engine's."""
        return self.step % self.plain_update_every_steps == 0

    def minibatches(self, epoch: int, groups: Sequence[SampleGroup]) -> list[Sequence[SampleGroup]]:
        """Groups of each optimizer step of an epoch: of the batch in order in the first, and shuffled in later ones."""
        if epoch > 0 and self.algorithm.minibatches > 1:
            # seeded by counters alone, so that a resumed run shuffles like an uninterrupted one, and all ranks alike
            shuffled = np.random.default_rng((self.step, epoch)).permutation(len(groups))
            groups = [groups[index] for index in shuffled]
        # of nearly equal size, none of them empty
        bounds = np.linspace(0, len(groups), self.algorithm.minibatches + 1).astype(int)
        return [groups[a:b] for a, b in pairwise(bounds) if b > a]

    def passes(self, batch: Batch) -> list[Sequence[SampleGroup]]:
        """Groups that are dealt together, of all passes of the update."""
        # epochs of a single minibatch are alike
        epochs = self.algorithm.ppo_epochs if self.algorithm.minibatches > 1 else 1
        trained = [groups for epoch in range(epochs) for groups in self.minibatches(epoch, batch.groups)]
        return [*([batch.left_out] if self.is_plain else []), *trained]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesByRank:
    """The images that each rank of a policy needs for a call, by their keys."""

    policy: Deal
    reference: Deal | None
    """None where there is no reference model apart."""
    schedule: Schedule
    limit_tokens: int
    """Largest micro-batch in effect, which is below the settings' after memory ran out."""
    shares: tuple[int, ...] = ()
    """The share of the micro-batches that each worker has a part in, by rank; empty where each has one of its own."""

    def to_annotate(
        self, batch: Batch, *, policy_passes: bool, reference_passes: bool, beside_engine: bool
    ) -> list[ImageKeys]:
        deals = [self.policy] if policy_passes else []
        deals += [self.reference or self.policy] if reference_passes else []
        limit = min(self.limit_tokens, largest_group_tokens(batch.groups)) if beside_engine else self.limit_tokens
        return self._union(deal.images_of_ranks(batch.groups, limit) for deal in deals)

    def to_update(self, batch: Batch) -> list[ImageKeys]:
        passes = self.schedule.passes(batch)
        return self._union(self.policy.images_of_ranks(groups, self.limit_tokens) for groups in passes)

    def to_imitate(self, prompts: Sequence[Prompt]) -> list[ImageKeys]:
        return self._of_workers(self.policy.images_to_imitate(prompts))

    def _union(self, passes: Iterable[Sequence[ImageKeys]]) -> list[ImageKeys]:
        keys: list[ImageKeys] = [frozenset()] * self.policy.num_ranks
        for of_ranks in passes:
            keys = [mine | more for mine, more in zip(keys, of_ranks, strict=True)]
        return self._of_workers(keys)

    def _of_workers(self, keys: list[ImageKeys]) -> list[ImageKeys]:
        return [keys[share] for share in self.shares] if self.shares else keys


def _keys(images: Iterable[PromptImage]) -> ImageKeys:
    return frozenset(image.key for image in images)
