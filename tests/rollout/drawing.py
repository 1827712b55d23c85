"""Asking an embedded engine for completions, and comparing what it drew."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import numpy as np

from fovea.models.activation_tape import Tape
from fovea.models.plain import PlainVLM
from fovea.models.tiny import TinyParts
from fovea.models.trainable import merged_weights
from fovea.models.vlm import VLM
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.rollout.embedded.plain import PlainEngine
from fovea.rollout.embedded.tuning import Tuning
from fovea.types import Completion, Prompt, Request, Sampling
from fovea.utils.event_loop import wait_for

LOGPROB_TOLERANCE = 1e-5


def make_engine(
    parts: TinyParts,
    max_batch_tokens: int | None = 10_000,
    *,
    tape: Tape | None = None,
    pushed: Collection[str] = (),
    can_give_way: bool = False,
    **tuning: object,
) -> EmbeddedEngine:
    """An engine on the tensors of a model."""
    engine = EmbeddedEngine(
        VLM(parts.network, parts.processor.banned_ids),
        parts.processor,
        max_batch_tokens=max_batch_tokens,
        tape=tape,
        tuning=Tuning(**tuning),  # type: ignore[arg-type]
        pushed=pushed,
        can_give_way=can_give_way,
    )
    engine.load_weights(dict(merged_weights(parts.network)), version=7)
    return engine


def plain_engine(parts: TinyParts, max_batch_tokens: int = 10_000) -> PlainEngine:
    engine = PlainEngine(
        PlainVLM(parts.network, parts.processor.banned_ids), parts.processor, max_batch_tokens=max_batch_tokens
    )
    engine.load_weights(dict(merged_weights(parts.network)), version=7)
    return engine


def generate(
    engine: EmbeddedEngine | PlainEngine,
    prompts: Sequence[Prompt],
    samplings: Sequence[Sampling],
    n: int | Sequence[int],
    *,
    for_update: bool = False,
) -> list[Sequence[Completion]]:
    """All requests at once."""
    counts = [n] * len(prompts) if isinstance(n, int) else n

    async def all_of_them() -> list[Sequence[Completion]]:
        requests = (
            Request(id=str(i), prompt=p, sampling=s, n=k, for_update=for_update)
            for i, (p, s, k) in enumerate(zip(prompts, samplings, counts, strict=True))
        )
        return await asyncio.gather(*map(engine.generate, requests))

    return wait_for(all_of_them())


def seeded(count: int, **settings: object) -> list[Sampling]:
    return [Sampling(seed=seed, **settings) for seed in range(count)]  # type: ignore[arg-type]


def same(first: Sequence[Completion], second: Sequence[Completion]) -> bool:
    return all(
        a.token_ids_T.tolist() == b.token_ids_T.tolist()
        and (a.text, a.finish) == (b.text, b.finish)
        and np.allclose(a.logprobs_T, b.logprobs_T, atol=LOGPROB_TOLERANCE)
        for a, b in zip(first, second, strict=True)
    )
