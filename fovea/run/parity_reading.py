"""The result of the parity gate, and the rules by which it passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fovea.run.parity_rows import PromptKind

IMAGE_RATIO, IMAGE_FLOOR_FRAC = 4.0, 0.1
"""The mean difference with images may be this many times that without, plus this share of the limit: in float32 both
are rounding, of which one may be ten times the other, and in bfloat16 a text of few likely tokens is nearly exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnToken:
    """One sampled token with the log-probs of engine and trainer."""

    row: str
    """Id of its task."""
    number: int
    """Position in the completion, from 1."""
    token_id: int
    text: str
    engine_logprob: float
    trainer_logprob: float

    @property
    def gap(self) -> float:
        """Absolute difference; NaN, which exceeds any limit, where a side is not finite."""
        return abs(self.engine_logprob - self.trainer_logprob)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindReading:
    """Parity over all tokens sampled for one kind of prompt."""

    kind: PromptKind
    prompts: int
    tokens: int
    mean_abs: float
    k3: float
    """Mean of e^x - x - 1 with x = trainer - engine: the k3 estimate of KL(engine || trainer)."""
    worst: DrawnToken


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that a reading breaks."""

    kind: KindReading
    """The kind of prompt that breaks it."""
    text: str
    """What is seen, and what the rule allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReading:
    """Result of the parity gate."""

    model: str
    engine: str
    limit: float
    """Largest mean absolute difference of a kind of prompt."""
    max_k3: float
    """Largest k3 of a kind of prompt."""
    kinds: tuple[KindReading, ...]

    @property
    def worst(self) -> KindReading:
        """The kind of prompt with the largest mean difference; NaN counts as larger than any number."""
        return max(self.kinds, key=lambda kind: nan_as_infinity(kind.mean_abs))

    @property
    def violation(self) -> Violation | None:
        """The first broken rule: on the mean, on k3, on images beside text; None for a sound engine and trainer."""
        return self._mean_violation() or self._k3_violation() or self._image_violation()

    @property
    def passed(self) -> bool:
        return self.violation is None

    def _mean_violation(self) -> Violation | None:
        kind = self.worst
        if kind.mean_abs <= self.limit:
            return None
        text = f"differ by {kind.mean_abs:.3g} on average, and parity.max_abs_logprob_diff={self.limit:g}"
        return Violation(kind=kind, text=text)

    def _k3_violation(self) -> Violation | None:
        """Few tokens that are far off, which a mean hides: most tokens of a trained model are nearly certain."""
        kind = max(self.kinds, key=lambda kind: nan_as_infinity(kind.k3))
        if kind.k3 <= self.max_k3:
            return None
        return Violation(kind=kind, text=f"have a k3 of {kind.k3:.3g}, and parity.max_k3={self.max_k3:g}")

    def _image_violation(self) -> Violation | None:
        """Images that are treated differently, on a model that is certain of most tokens whatever it sees."""
        by_kind = {kind.kind: kind for kind in self.kinds}
        images, text = by_kind.get("with images"), by_kind.get("without images")
        if images is None or text is None:
            return None
        allowed = IMAGE_RATIO * text.mean_abs + IMAGE_FLOOR_FRAC * self.limit
        if images.mean_abs <= allowed:
            return None
        seen = f"differ by {images.mean_abs:.3g} on average, and by {text.mean_abs:.2g} without images"
        return Violation(
            kind=images,
            text=f"{seen}; {allowed:.2g} is allowed, {IMAGE_RATIO:g} times that and {IMAGE_FLOOR_FRAC:g} of "
            f"parity.max_abs_logprob_diff={self.limit:g}",
        )


def nan_as_infinity(value: float) -> float:
    """The value as it is ordered among readings."""
    return math.inf if math.isnan(value) else value


def parity_failure(reading: ParityReading) -> str:
    """Error message of a reading that breaks a rule."""
    broken = reading.violation
    assert broken is not None, "no rule is broken"
    kind, token = broken.kind, broken.kind.worst
    return (
        f"{reading.model}: on prompts {kind.kind} the log-probs of the {reading.engine} engine and of the trainer "
        f"{broken.text}; worst is token {token.text!r} (id {token.token_id}), number {token.number} of a completion of "
        f"{token.row}: {token.engine_logprob:.3f} in the engine, {token.trainer_logprob:.3f} in the trainer. "
        f"{_likely_fix(reading, broken)}"
    )


def _likely_fix(reading: ParityReading, broken: Violation) -> str:
    if reading.engine.endswith("(int8 decoding)"):
        return "Set rollout.engine.decode_weights=exact, or raise the limit to what importance_sampling_fix may correct"
    others = [kind for kind in reading.kinds if kind.kind != broken.kind.kind]
    agree = all(kind.mean_abs <= reading.limit and kind.k3 <= reading.max_k3 for kind in others)
    if broken.kind.kind == "with images" and others and agree:
        return "Without images they agree: look at the positions of image tokens and at what encodes the images"
    return (
        "Engine and trainer hold other weights, or one of them computes another model: compare both with transformers "
        "(`fovea doctor RECIPE` measures again), or raise the limit for an engine that is known to be this inexact"
    )
