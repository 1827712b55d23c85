"""Peak memory of a forward and a backward pass, found by walking through the stages of a network.

A stage keeps activations from its forward pass until its backward pass has run, as in "Reducing Activation
Recomputation in Large Transformer Models" (Korthikanti et al., arXiv 2205.05198, section 4), and both of its passes
have temporaries. Gradients of weights appear stage by stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Bytes: TypeAlias = Counter[str]
"""Bytes by part of a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassStage:
    """A module that runs forward, and later backward."""

    part: str
    """Part of the plan to which its activations belong."""
    saved: int
    """Bytes from its forward pass that its backward pass reads."""
    forward: int = 0
    """Most bytes of temporaries in its forward pass."""
    backward: int = 0
    """Most bytes that its backward pass needs beyond what is saved."""
    gradient: int = 0
    """Bytes of the gradients of its weights."""
    pending: int = 0
    """Bytes of a gradient that waits for a stage further down which has the same weight (a tied embedding), or for the
    end of the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment at which a pass holds most."""

    held: Bytes

    @property
    def total(self) -> int:
        return self.held.total()


def peak_of(stages: Sequence[PassStage], *, gradients_part: str, gradients_held: bool) -> Peak:
    """The peak of a forward pass through the stages and a backward pass in reverse.

    `gradients_held`: an earlier micro-batch has left all gradients.
    """
    moments: list[Bytes] = []
    held: Bytes = Counter()
    gradients = Counter({gradients_part: sum(stage.gradient for stage in stages)}) if gradients_held else Counter()
    for stage in stages:
        held[stage.part] += stage.saved
        moments.append(held + gradients + Counter({stage.part: stage.forward}))
    pending: Bytes = Counter()
    for stage in reversed(stages):
        if not gradients_held:
            gradients[gradients_part] += stage.gradient
        pending[gradients_part] += stage.pending
        moments.append(held + gradients + pending + Counter({stage.part: stage.backward}))
        held[stage.part] -= stage.saved
    return Peak(held=max(moments, key=lambda moment: moment.total()))
