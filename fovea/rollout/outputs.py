"""Completions from what engines of other packages give, and the requests that these can serve at all.

Axes: `L` tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fovea.errors import EngineError
from fovea.rollout.detokenizer import CompletionText
from fovea.types import Completion, FinishReason, Request

FINISHES: Mapping[str | None, FinishReason] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One completion as the engine gives it."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The answer to a request as the engine gives it."""

    prompt_ids_L: Sequence[int]
    """The prompt that the completions continue, with the visual tokens of its images."""
    completions: Mapping[int, Sampled]
    """By their numbers in the engine."""


def completions(request: Request, drawn: Drawn, text: CompletionText, *, version: int) -> list[Completion]:
    """The completions of a request; EngineError for one that is none, or where the engine has another prompt."""
    check_expansion(request.prompt.token_ids_L, drawn.prompt_ids_L)
    # a greedy request was made once for all of its completions
    numbers = range(request.n) if request.sampling.temperature else [0] * request.n
    return [
        _completion(request, place, drawn.completions[number], text, version) for place, number in enumerate(numbers)
    ]


def _completion(request: Request, place: int, sampled: Sampled, text: CompletionText, version: int) -> Completion:
    logprobs_T = np.asarray(sampled.logprobs, dtype=np.float32)
    finish = FINISHES.get(sampled.finish_reason)
    if finish is None:
        raise EngineError(
            f"the engine ended request {request.id} with {sampled.finish_reason!r} instead of a completion"
        )
    if not np.isfinite(logprobs_T).all():
        raise EngineError(
            "the model's logits are not finite, so no token can be sampled: the weights have diverged; "
            "resume from an earlier checkpoint with a lower train.learning_rate"
        )
    return Completion(
        id=f"{request.id}/{place}",
        token_ids_T=np.asarray(sampled.token_ids, dtype=np.int64),
        logprobs_T=logprobs_T,
        text=text.decode(sampled.token_ids, request.sampling.stop),
        finish=finish,
        version=version,
    )


def check_fits(request: Request, *, max_model_len: int, max_images: int) -> None:
    """Raise EngineError for a request with more tokens or images than the engine was made for."""
    num_tokens, num_new, num_images = (
        request.prompt.num_tokens,
        request.sampling.max_new_tokens,
        len(request.prompt.images),
    )
    if num_tokens + num_new > max_model_len:
        raise EngineError(
            f"a prompt of {num_tokens} tokens with completions of up to {num_new} needs {num_tokens + num_new}, "
            f"and the engine has max_model_len={max_model_len}; raise that, or lower rollout.max_new_tokens "
            "or model.max_pixels"
        )
    if num_images > max_images:
        raise EngineError(
            f"a prompt has {num_images} images, and the engine has limit_mm_per_prompt.image={max_images}; raise that"
        )


def check_expansion(ours_L: NDArray[np.int64], engines: Sequence[int]) -> None:
    """Raise EngineError unless the engine's prompt is ours, token for token.

    An engine that expands an image by other pixel limits computes log-probs of another prompt than the trainer.
    """
    if not np.array_equal(ours_L, np.asarray(engines)):
        raise EngineError(
            f"the engine's prompt has {len(engines)} tokens with its images expanded, the trainer's {len(ours_L)}: "
            "they process images differently; give both the same image processor and the same model.min_pixels and "
            "model.max_pixels"
        )
