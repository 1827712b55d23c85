"""Exact log-probs of answers given their prompts, computed by the network that is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fovea.models.policy_network import PolicyNetwork
from fovea.train.packing import pack_row
from fovea.types import Prompt

_CHUNK_TOKENS = 1024
Answered: TypeAlias = tuple[Prompt, NDArray[np.int64]]
"""A prompt and the token ids [T] of an answer to it."""


@torch.inference_mode()
def answer_logprobs(
    vlm: PolicyNetwork, answered: Iterable[Answered], *, max_tokens: int, temperature: float
) -> Iterator[float]:
    """Yield the log-prob of each answer given its prompt.

    Answers are packed into rows of at most `max_tokens`, a longer one into a row by itself. Only the prompts of one row
    are in memory at a time.
    """
    for row in _rows(answered, max_tokens):
        prompts, answers = zip(*row, strict=True)
        packed = pack_row(vlm.family, prompts, [[answer_T] for answer_T in answers], vlm.device)
        logprobs_A = vlm(packed, temperature=temperature, chunk_tokens=_CHUNK_TOKENS).logprobs_A
        yield from (float(of_answer_T.sum()) for of_answer_T in logprobs_A.split(list(map(len, answers))))


def _rows(answered: Iterable[Answered], max_tokens: int) -> Iterator[list[Answered]]:
    row, tokens = list[Answered](), 0
    for prompt, answer_T in answered:
        more = prompt.num_tokens + len(answer_T)
        if row and tokens + more > max_tokens:
            yield row
            row, tokens = [], 0
        row.append((prompt, answer_T))
        tokens += more
    if row:
        yield row
