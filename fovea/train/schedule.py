"""Minibatches of an update, and the images that each rank needs in the calls of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fovea.config.algorithm import Algorithm
from fovea.samples import on_masked, without_masked
from fovea.train.row_assignment import ImageKeys, RowAssignment, tokens_beside_engine
from fovea.types import Batch, Prompt, SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePasses:
    """Passes of the update of one step."""

    algorithm: Algorithm
    plain_update_every_steps: int
    step: int
    """Number of updates before this one."""

    @property
    def is_plain(self) -> bool:
        """True if the update reuses no activations and compares the log-probs of all groups with the engine's."""
        return self.step % self.plain_update_every_steps == 0

    def minibatches(self, epoch: int, groups: Sequence[SampleGroup]) -> list[Sequence[SampleGroup]]:
        """Groups of each optimizer step of an epoch: in batch order in the first epoch, and shuffled in later ones."""
        if epoch > 0 and self.algorithm.minibatches > 1:
            # seeded only by counters: a resumed run shuffles like an uninterrupted one, and all ranks shuffle alike
            shuffled = np.random.default_rng((self.step, epoch)).permutation(len(groups))
            groups = [groups[index] for index in shuffled]
        # of nearly equal size, none of them empty
        bounds = np.linspace(0, len(groups), self.algorithm.minibatches + 1).astype(int)
        return [groups[a:b] for a, b in pairwise(bounds) if b > a]

    def passes(self, batch: Batch) -> list[Sequence[SampleGroup]]:
        """Groups of each pass of the update; the groups of a pass are assigned to ranks together."""
        # epochs of a single minibatch are all the same
        epochs = self.algorithm.ppo_epochs if self.algorithm.minibatches > 1 else 1
        trained = [groups for epoch in range(epochs) for groups in self.minibatches(epoch, batch.groups)]
        return [*([batch.left_out] if self.is_plain else []), *trained]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesByRank:
    """The images that each rank of a policy needs for a call, by their keys."""

    policy: RowAssignment
    reference: RowAssignment | None
    """None without a separate reference model."""
    schedule: UpdatePasses
    limit_tokens: int
    """Largest micro-batch in effect; it is below the setting after memory ran out."""
    shares: tuple[int, ...] = ()
    """Index of the share of micro-batches that each worker runs, by rank; empty if each worker runs a separate one."""

    def for_logprobs(
        self, batch: Batch, *, policy_passes: bool, reference_passes: bool, masked_passes: bool, beside_engine: bool
    ) -> list[ImageKeys]:
        clean, masked = without_masked(batch).groups, on_masked(batch).groups
        passes = [(self.policy, clean)] if policy_passes else []
        passes += [(self.reference or self.policy, clean)] if reference_passes else []
        passes += [(self.policy, masked)] if masked_passes else []
        limit = self.limit_tokens
        if beside_engine:
            limit = tokens_beside_engine(clean, limit)
        return self._union(assignment.images_of_ranks(groups, limit) for assignment, groups in passes)

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
