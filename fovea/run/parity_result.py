"""The result of the parity gate, and the rules by which it passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fovea.algorithms.kl import k3
from fovea.run.parity_faults import Array, Columns, PromptKind
from fovea.types import SampleGroup


def kind_of(group: SampleGroup) -> PromptKind:
    return "with images" if group.images else "without images"


IMAGE_RATIO = 4.0
"""Allowed ratio of the mean differences with and without images, plus FLOOR_FRAC: in float32 both are rounding, and one
may be ten times the other; in bfloat16 a text of a few likely tokens is nearly exact."""
FLOOR_FRAC = {"float32": 1e-3, "bfloat16": 0.1}
"""Share of parity.max_abs_logprob_diff that counts as rounding in a model of this dtype."""
MEAN_FACTOR, K3_FACTOR = 3.0, 10.0
"""Factors by which the mean, or k3, which is quadratic, has to be smaller for a mismatch to be clearly smaller."""
STALE_FACTOR = 2.0
"""Factor by which the mismatch with a likely fault is smaller; training steps since the sampling add to both."""
FOUND_SIGMAS, RULED_OUT_SIGMAS = 4.0, 2.0
"""A sign test over tokens has to agree with the mean, which a single token may dominate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Distance between two lists of log-probs of the same tokens."""

    mean_abs: float
    k3: float
    """Mean of e^x - x - 1 with x = trainer - engine: the k3 estimate of KL(engine || trainer)."""

    @staticmethod
    def of(engine: Sequence[float] | Array, trainer: Sequence[float] | Array) -> Mismatch:
        # float64, so that k3 of a float32 rounding error does not vanish in rounding itself
        engine_A, trainer_A = (torch.as_tensor(x, dtype=torch.float64) for x in (engine, trainer))
        return Mismatch(mean_abs=float((engine_A - trainer_A).abs().mean()), k3=float(k3(engine_A, trainer_A).mean()))

    def clearly_below(self, other: Mismatch) -> bool:
        """True if this mismatch is smaller by a factor that chance does not explain."""
        return MEAN_FACTOR * self.mean_abs < other.mean_abs or K3_FACTOR * self.k3 < other.k3


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """One sampled token with the log-probs of engine and trainer."""

    row: str
    """Id of the token's task."""
    number: int
    """Position in the completion, from 1."""
    token_id: int
    text: str
    engine_logprob: float
    trainer_logprob: float

    @property
    def mismatch(self) -> float:
        """Absolute difference; infinite or NaN, which exceeds any limit, if a side is not finite."""
        return abs(self.engine_logprob - self.trainer_logprob)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindMismatch(Mismatch):
    """Mismatch over all tokens sampled for one kind of prompt."""

    kind: PromptKind
    prompts: int
    tokens: int
    worst: SampledToken


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultMismatch:
    """Comparison of the engine with the trainer and with a faulty trainer, on the prompts that the fault changes.

    `sound` and `faulty` are the two mismatches; `nearer_sound` and `nearer_fault` count tokens by the nearer trainer.
    """

    name: str
    sound: Mismatch
    faulty: Mismatch
    nearer_sound: int
    nearer_fault: int

    @staticmethod
    def of(name: str, columns: Sequence[Columns]) -> FaultMismatch:
        engine_A, sound_A, faulty_A = (np.concatenate(column) for column in zip(*columns, strict=True))
        to_sound_A, to_fault_A = np.abs(engine_A - sound_A), np.abs(engine_A - faulty_A)
        return FaultMismatch(
            name=name,
            sound=Mismatch.of(engine_A, sound_A),
            faulty=Mismatch.of(engine_A, faulty_A),
            nearer_sound=int((to_sound_A < to_fault_A).sum()),
            nearer_fault=int((to_fault_A < to_sound_A).sum()),
        )

    @property
    def ruled_out(self) -> bool:
        """The engine is clearly nearer to the sound trainer: in the mean, and on more tokens than chance explains.

        The few tokens that are compared after a weight sync rule a fault out if none of them is nearer to it.
        """
        most = self.nearer_fault == 0 or self._sigmas <= -RULED_OUT_SIGMAS
        return self.sound.clearly_below(self.faulty) and most

    @property
    def found(self) -> bool:
        """The engine is clearly nearer to the trainer with the fault: in the mean, and on many tokens."""
        return self.faulty.clearly_below(self.sound) and not self.ruled_out and self._sigmas >= FOUND_SIGMAS

    @property
    def likely(self) -> bool:
        """The engine, perhaps with older weights, is nearer to the faulty trainer: by STALE_FACTOR, on many tokens."""
        return STALE_FACTOR * self.faulty.mean_abs < self.sound.mean_abs and self._sigmas >= FOUND_SIGMAS

    @property
    def text(self) -> str:
        """The fault's name and both mean differences."""
        with_it = f"{self.faulty.mean_abs:.2g} from a trainer with it"
        return f"{self.name} ({with_it}, {self.sound.mean_abs:.2g} from the trainer as it is)"

    @property
    def _sigmas(self) -> float:
        """Sign test: the surplus of tokens nearer to the fault, in standard deviations under chance."""
        return (self.nearer_fault - self.nearer_sound) / math.sqrt(max(self.nearer_fault + self.nearer_sound, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule of the gate that a result breaks."""

    kind: KindMismatch
    """The kind of prompt that breaks the rule."""
    text: str
    """The measured value and the limit of the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityResult:
    """Result of the parity gate."""

    model: str
    engine: str
    limit: float
    """Largest allowed mean absolute difference of a kind of prompt; `max_k3` is the largest allowed k3."""
    max_k3: float
    dtype: str
    kinds: tuple[KindMismatch, ...]
    faults: tuple[FaultMismatch, ...] = ()

    @property
    def worst(self) -> KindMismatch:
        """The kind of prompt with the largest mean difference; NaN counts as larger than any number."""
        return max(self.kinds, key=lambda kind: nan_as_infinity(kind.mean_abs))

    @property
    def violation(self) -> Violation | None:
        """The first broken rule on mean, k3, known faults or images; None if engine and trainer agree."""
        return self._mean_violation() or self._k3_violation() or self._fault_violation() or self._image_violation()

    @property
    def passed(self) -> bool:
        return self.violation is None

    @property
    def sync_violation(self) -> Violation | None:
        """The first broken rule that a few tokens can decide: on the mean, or on known faults."""
        return self._mean_violation() or self._fault_violation()

    def _mean_violation(self) -> Violation | None:
        kind = self.worst
        if kind.mean_abs <= self.limit:
            return None
        text = f"differ by {kind.mean_abs:.3g} on average; the limit is parity.max_abs_logprob_diff={self.limit:g}"
        return Violation(kind=kind, text=text)

    def _k3_violation(self) -> Violation | None:
        """A few tokens that are far off, which the mean hides: most tokens of a trained model are nearly certain."""
        kind = max(self.kinds, key=lambda kind: nan_as_infinity(kind.k3))
        if kind.k3 <= self.max_k3:
            return None
        limit = f"parity.max_abs_logprob_diff={self.limit:g} allows up to {self.max_k3:.3g}"
        return Violation(kind=kind, text=f"have a k3 of {kind.k3:.3g}, and {limit}")

    @property
    def doubtful(self) -> tuple[FaultMismatch, ...]:
        """Faults that the engine may have, since it is not clearly nearer to the sound trainer; the nearest first."""
        doubtful = [fault for fault in self.faults if not fault.ruled_out]
        return tuple(sorted(doubtful, key=lambda fault: nan_as_infinity(fault.faulty.mean_abs)))

    def _fault_violation(self) -> Violation | None:
        found = [fault for fault in self.doubtful if fault.found]
        if not found:
            return None
        text = f"differ by {found[0].sound.mean_abs:.3g} on average, and by {found[0].faulty.mean_abs:.2g} with a fault"
        return Violation(kind=self.worst, text=text)

    def _image_violation(self) -> Violation | None:
        """A difference that is larger with images, unless all known faults are ruled out."""
        by_kind = {kind.kind: kind for kind in self.kinds}
        images, text = by_kind.get("with images"), by_kind.get("without images")
        if images is None or text is None or (self.faults and not self.doubtful):
            return None
        frac = FLOOR_FRAC[self.dtype]
        allowed = IMAGE_RATIO * text.mean_abs + frac * self.limit
        if images.mean_abs <= allowed:
            return None
        seen = f"differ by {images.mean_abs:.3g} on average, and by {text.mean_abs:.2g} without images"
        return Violation(
            kind=images,
            text=f"{seen}; {allowed:.2g} is allowed: {IMAGE_RATIO:g} times that plus {frac:g} of "
            f"parity.max_abs_logprob_diff={self.limit:g}",
        )


def nan_as_infinity(value: float) -> float:
    """The value for comparisons, with NaN as infinity."""
    return math.inf if math.isnan(value) else value


def parity_failure(result: ParityResult) -> str:
    """Error message for a result that breaks a rule."""
    broken = result.sync_violation or result.violation
    assert broken is not None, "no rule is broken"
    kind, token = broken.kind, broken.kind.worst
    return (
        f"{result.model}: on prompts {kind.kind} the log-probs of the {result.engine} engine and of the trainer "
        f"{broken.text}; the worst token is {token.text!r} (id {token.token_id}), number {token.number} of a "
        f"completion of {token.row}: {token.engine_logprob:.3f} in the engine, {token.trainer_logprob:.3f} in the "
        "trainer. "
        f"{nearest_fault(result)}{_likely_fix(result, broken)}"
    )


def nearest_fault(result: ParityResult) -> str:
    """Sentence about the fault that is nearest to the engine; empty if the sound trainer is nearer than all faults."""
    nearest = next(iter(result.doubtful), None)
    if nearest is None or not nearest.faulty.mean_abs < nearest.sound.mean_abs:
        return ""
    verdict = "The engine seems to have this fault" if nearest.found else "No known fault explains it; the nearest is"
    return f"{verdict}: {nearest.text}. "


def _likely_fix(result: ParityResult, broken: Violation) -> str:
    if result.engine.endswith("(int8 decoding)"):
        return "Set rollout.engine.decode_weights=exact, or raise the limit to what importance_sampling_fix can correct"
    others = [kind for kind in result.kinds if kind.kind != broken.kind.kind]
    agree = all(kind.mean_abs <= result.limit and kind.k3 <= result.max_k3 for kind in others)
    if broken.kind.kind == "with images" and others and agree:
        return (
            "Without images they agree: look at the positions of image tokens and at the encoding of images. Does the "
            "engine receive the images, has it loaded the weights of the vision tower, does it resize images as the "
            "trainer does?"
        )
    return (
        "Engine and trainer hold different weights, or compute different models: compare both with transformers "
        "(`fovea doctor RECIPE` measures again), or raise the limit for an engine that is known to be this inexact"
    )
