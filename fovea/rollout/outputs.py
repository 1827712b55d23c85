"""Conversion of other packages' engine outputs into completions, and checks of requests and prompts for them.

Axes: `L` tokens of a prompt, `T` tokens of a completion.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fovea.errors import EngineError
from fovea.types import Completion, Prompt, PromptImage, Request, Sampling
from fovea_gym.environments.answer_end import find_answer_end
from fovea_gym.graders.math_answer import BOX
from fovea_gym.tools.calls import gemma_calls
from fovea_gym.types import AnswerEnd, FinishReason

FINISHES: Mapping[str | None, FinishReason] = {"stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One completion as the engine returns it."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """The engine's output for one request."""

    prompt_ids_L: Sequence[int]
    """Token ids of the prompt, with the visual tokens of its images."""
    completions: Mapping[int, Sampled]
    """Completions by the index that the engine gave them."""


def completions(request: Request, sampled: EngineOutput, text: CompletionText, *, version: int) -> list[Completion]:
    """Build the completions of a request; EngineError if one did not finish, or if the engine read another prompt."""
    check_prompt(request.prompt, sampled.prompt_ids_L)
    # the engine samples a greedy request once, for all of its completions
    numbers = range(request.n) if request.sampling.temperature else [0] * request.n
    return [
        _completion(request, place, sampled.completions[number], text, version) for place, number in enumerate(numbers)
    ]


def _completion(request: Request, place: int, sampled: Sampled, text: CompletionText, version: int) -> Completion:
    finish = FINISHES.get(sampled.finish_reason)
    if finish is None:
        raise EngineError(
            f"the engine ended request {request.id} with {sampled.finish_reason!r} instead of a completion"
        )
    token_ids_T, logprobs_T = np.asarray(sampled.token_ids, np.int64), np.asarray(sampled.logprobs, np.float32)
    end = request.sampling.answer_end
    # engines of other packages do not know this rule: they continue, and the tokens after the answer are dropped
    if end is not None and (length := text.answer_tokens(sampled.token_ids, end)) is not None:
        token_ids_T, logprobs_T, finish = token_ids_T[:length], logprobs_T[:length], "stop"
    return make_completion(request, place, token_ids_T, logprobs_T, finish, text, version)


def make_completion(
    request: Request,
    place: int,
    token_ids_T: NDArray[np.int64],
    logprobs_T: NDArray[np.float32],
    finish: FinishReason,
    text: CompletionText,
    version: int,
) -> Completion:
    """Build completion number `place` of a request; EngineError if its log-probs are not finite."""
    if not np.isfinite(logprobs_T).all():
        raise EngineError(
            "the model's logits are not finite, so no token can be sampled: the weights have diverged; "
            "resume from an earlier checkpoint with a lower train.learning_rate"
        )
    return Completion(
        id=f"{request.id}/{place}",
        token_ids_T=token_ids_T,
        logprobs_T=logprobs_T,
        text=text.decode(token_ids_T.tolist(), request.sampling.stop),
        finish=finish,
        version=version,
    )


def check_fits(request: Request, *, max_model_len: int, max_images: int) -> None:
    """Raise EngineError for a request with more tokens or images than the engine was started for."""
    num_tokens, num_new, num_images = (
        request.prompt.num_tokens,
        request.sampling.max_new_tokens,
        len(request.prompt.images),
    )
    if num_tokens + num_new > max_model_len:
        raise EngineError(
            f"a prompt of {num_tokens} tokens with completions of up to {num_new} needs {num_tokens + num_new}, "
            f"but the engine has max_model_len={max_model_len}; raise it, or lower rollout.max_new_tokens "
            "or model.max_pixels"
        )
    if num_images > max_images:
        raise EngineError(
            f"a prompt has {num_images} images, but the engine has limit_mm_per_prompt.image={max_images}; raise it"
        )


def check_prompt(ours: Prompt, engines: Sequence[int]) -> None:
    """Raise EngineError unless the engine's prompt equals ours token for token; the error names the likely cause.

    With other tokens, the engine's log-probs would belong to another prompt than the trainer's.
    """
    theirs_L = np.asarray(engines, np.int64)
    if np.array_equal(ours.token_ids_L, theirs_L):
        return
    ids, counts = np.unique(ours.token_ids_L, return_counts=True)
    visual = [index for index, n in zip(ids, counts, strict=True) if n > np.sum(ours.unexpanded_ids_U == index)]
    is_ours_L, is_theirs_L = np.isin(ours.token_ids_L, visual), np.isin(theirs_L, visual)
    num_ours, num_theirs = int(is_ours_L.sum()), int(is_theirs_L.sum())
    if not np.array_equal(ours.token_ids_L[~is_ours_L], theirs_L[~is_theirs_L]):
        cause = "it was sent text in place of token ids, or tokenized the text again; send it the token ids"
    elif not num_theirs:
        cause = "the images do not reach it; send them with each request"
    elif 2 * num_ours - len(ours.images) <= num_theirs <= 2 * num_ours:
        cause = "it expands image tokens that are expanded already; do not expand them on both sides"
    else:
        cause = "it resizes images differently; use one image processor, model.min_pixels and model.max_pixels for both"
    raise EngineError(
        f"the engine's prompt has {len(theirs_L)} tokens, {num_theirs} of them for images, but the trainer's prompt "
        f"has {len(ours.token_ids_L)}, {num_ours} of them for images: {cause}"
    )


def stop_strings(sampling: Sampling) -> list[str]:
    """Stop strings for an engine of another package; it cannot stop at an answer that ends by another rule."""
    end = sampling.answer_end
    return [*sampling.stop, *([end.closing] if end and end.closing and not end.after else [])]


class CompletionText:
    """Decodes completions with one tokenizer, and finds stop strings and ends of answers in them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._hidden_ids = frozenset(special.values()).difference(special.get(mark) for mark in gemma_calls.MARKS)

    def decode(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """Decode without special tokens, except those of tool calls; the text ends before the first stop string."""
        text = self._plain(token_ids)
        ends = [index for string in stop if (index := text.find(string)) >= 0]
        return text[: min(ends)] if ends else text

    def holds_stop(self, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
        """True if a stop string occurs in the last tokens, of which it reads as many as a stop string can span."""
        text = self._plain(token_ids[-self.tail_tokens(stop) :])
        return any(string in text for string in stop)

    def answer_tokens(self, token_ids: Sequence[int], end: AnswerEnd) -> int | None:
        """Number of tokens up to and including the one that closes the answer; None while the answer is open."""

        def has_ended(num_tokens: int) -> bool:
            return find_answer_end(self._plain(token_ids[:num_tokens]), end) is not None

        if not has_ended(len(token_ids)):
            return None
        # further tokens never reopen the answer, so a binary search works
        return bisect_left(range(len(token_ids)), True, key=has_ended)

    def first_answer_token(self, token_ids: Sequence[int], end: AnswerEnd) -> int:
        """Index from which to continue the search for the answer; the answer, or the mark before it, starts later."""
        mark = end.after or end.closing or BOX
        return 0 if mark in self._plain(token_ids) else max(0, len(token_ids) - self.tail_tokens((mark,)))

    def tail_tokens(self, stop: Sequence[str]) -> int:
        """Number of last tokens that is certain to contain any of the stop strings completely."""
        # a token holds at least one byte, and a character at most four
        return 4 * max(len(string) for string in stop) + 4

    def _plain(self, token_ids: Sequence[int]) -> str:
        if token_ids and token_ids[-1] in self._stop_ids:
            token_ids = token_ids[:-1]
        text = self._tokenizer.decode([index for index in token_ids if index not in self._hidden_ids])
        assert isinstance(text, str)
        return text


def stacked(images: Sequence[PromptImage]) -> dict[str, Tensor]:
    """Concatenate patches [patches of all images, values] and grids [images, 3] of images, by transformers' names."""
    return {
        name: torch.from_numpy(np.concatenate([np.atleast_2d(image.tensors[name]) for image in images]))
        for name in ("pixel_values", "image_grid_thw")
    }
