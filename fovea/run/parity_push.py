"""The last push of weights that the engine is known to have taken.

Weights from before that push cannot be imitated in a batch, and the policy no longer has them. But it has scored what
the engine drew with them, and a request of the same seed draws the same tokens from the same weights.

Axes: `A` action tokens of a group or a sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fovea.environments.prompt_source import PromptedTask
from fovea.run.parity_faults import PromptKind
from fovea.types import SampleGroup

Array: TypeAlias = NDArray[np.float32]
Columns: TypeAlias = tuple[Array, Array, Array]
"""Log-probs [A] of the same tokens: the engine's, the trainer's, and those of a trainer with a fault."""


@dataclass(slots=True)
class TakenPush:
    """Completions drawn after that push, with the policy's log-probs of their tokens."""

    prompts: Sequence[tuple[PromptKind, PromptedTask]] = ()
    """Prompts to draw from after each push; empty before the gate, and without one."""
    version: int = 0
    _tokens: list[tuple[NDArray[np.int64], Array]] = field(default_factory=list)
    """Ids [A] and log-probs [A] of each sample's actions."""

    def remember(self, version: int, groups: Sequence[SampleGroup], sound: Sequence[Array]) -> None:
        """Take this push for the last one that the engine has taken; `sound` are the policy's log-probs [A]."""
        self.version = version
        self._tokens = list(_by_sample(groups, sound))

    def beside(self, groups: Sequence[SampleGroup], sound: Sequence[Array]) -> list[Columns]:
        """Log-probs after a later push, beside those of the remembered push on the tokens that both have drawn."""
        engine = [engine_logprobs(group) for group in groups]
        after = zip(_by_sample(groups, engine), _by_sample(groups, sound), strict=True)
        columns = list[Columns]()
        for (before_A, stale_A), ((ids_A, engine_A), (_, sound_A)) in zip(self._tokens, after, strict=True):
            same = _num_equal(before_A, ids_A)
            columns += [(engine_A[:same], sound_A[:same], stale_A[:same])] if same else []
        return columns


def engine_logprobs(group: SampleGroup) -> Array:
    """The engine's log-probs [A] of a group."""
    return np.concatenate([sample.rollout_logprobs_T[sample.mask_T] for sample in group.samples])


def _by_sample(groups: Sequence[SampleGroup], values: Sequence[Array]) -> Iterator[tuple[NDArray[np.int64], Array]]:
    """Ids [A] and values [A] of each sample's actions."""
    for group, values_A in zip(groups, values, strict=True):
        ends = np.cumsum([sample.num_actions for sample in group.samples])
        for sample, of_sample_A in zip(group.samples, np.split(values_A, ends[:-1]), strict=True):
            yield sample.token_ids_T[sample.mask_T], of_sample_A


def _num_equal(a_A: NDArray[np.int64], b_A: NDArray[np.int64]) -> int:
    """Length of the common beginning of two lists of ids."""
    length = min(len(a_A), len(b_A))
    return int(np.argmin([*(a_A[:length] == b_A[:length]), False]))
