"""Faults and readings for the parity gate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from fovea.models.families.qwen_vl import QwenVL
from fovea.run.parity_reading import DrawnToken
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Batch

ROUNDING = 1e-5
"""float32: two ways to one log-prob."""


def plain_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer counts image tokens like words, as a trainer without M-RoPE does."""
    own = TorchPolicy.logprobs

    def like_words(_self: QwenVL, ids: NDArray[np.int64], _images: object, start: int) -> tuple[NDArray[np.int64], int]:
        return np.arange(start, start + len(ids))[None].repeat(3, axis=0), start + len(ids)

    def scored(policy: TorchPolicy, batch: Batch) -> Sequence[NDArray[np.float32]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(QwenVL, "positions", like_words)
            return own(policy, batch)

    monkeypatch.setattr(TorchPolicy, "logprobs", scored)


def tokens(engine: Sequence[float], trainer: Sequence[float]) -> list[DrawnToken]:
    return [
        DrawnToken(row="r", number=number, token_id=number, text="x", engine_logprob=a, trainer_logprob=b)
        for number, (a, b) in enumerate(zip(engine, trainer, strict=True), start=1)
    ]
