"""Asking an embedded engine for completions, and comparing what it drew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from fovea.models.activation_tape import Tape
from fovea.models.plain import PlainVLM
from fovea.models.tiny import TinyParts
from fovea.models.trainable import merged_weights
from fovea.models.vlm import VLM
from fovea.rollout.base import Engine
from fovea.rollout.embedded import decode_step
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.rollout.embedded.memory import PoolMemory
from fovea.rollout.embedded.plain import PlainEngine
from fovea.rollout.embedded.requests import KeptKeys
from fovea.rollout.embedded.tuning import Tuning
from fovea.types import Completion, Prompt, Request, Sampling
from fovea_gym.utils.event_loop import wait_for
from fovea_gym.utils.lru_cache import LRUCache
from tests.tiny_models import mixed_prompts

LOGPROB_TOLERANCE = 1e-5


def make_engine(
    parts: TinyParts,
    max_batch_tokens: int | None = 10_000,
    *,
    tape: Tape | None = None,
    synced: Collection[str] = (),
    can_free_memory: bool = False,
    **tuning: object,
) -> EmbeddedEngine:
    """An engine on the tensors of a model."""
    engine = EmbeddedEngine(
        VLM(parts.network, parts.processor.banned_ids),
        parts.processor,
        max_batch_tokens=max_batch_tokens,
        tape=tape,
        tuning=Tuning(**tuning),  # type: ignore[arg-type]
        synced=synced,
        can_free_memory=can_free_memory,
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
    requests = [
        Request(id=str(i), prompt=p, sampling=s, n=k, for_update=for_update)
        for i, (p, s, k) in enumerate(zip(prompts, samplings, counts, strict=True))
    ]
    return together(engine, requests)


def together(engine: Engine, requests: Iterable[Request]) -> list[Sequence[Completion]]:
    """Completions of all requests, made at once."""

    async def asked() -> list[Sequence[Completion]]:
        return await asyncio.gather(*map(engine.generate, requests))

    return wait_for(asked())


def noted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., object]) -> None:
    """Give `note` the arguments of each call of a function or method from now on."""
    real = getattr(owner, name)

    def noting(*arguments: Any, **named: Any) -> Any:
        note(*arguments, **named)
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, noting)


def noted_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every decoding step from now on."""
    seen: list[int] = []
    noted(monkeypatch, decode_step, "decode", lambda _weights, _shape, hidden, *_, **__: seen.append(len(hidden)))
    return seen


def noted_turns(monkeypatch: pytest.MonkeyPatch) -> list[tuple[KeptKeys, int]]:
    """The keys that an engine keeps of each turn from now on, and how many turns it keeps then."""
    kept: list[tuple[KeptKeys, int]] = []
    put = LRUCache.put

    def putting(cache: LRUCache[Any, Any], key: Any, value: Any, size: int) -> None:
        put(cache, key, value, size)
        if isinstance(value, KeptKeys):
            kept.append((value, len(cache)))

    monkeypatch.setattr(LRUCache, "put", putting)
    return kept


def keep_turns_of(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are made from now on keep turns of at most so many tokens in all."""
    size = PoolMemory.size

    def sized(memory: PoolMemory, token_bytes: int) -> None:
        size(memory, token_bytes)
        memory.kept_tokens = tokens

    monkeypatch.setattr(PoolMemory, "size", sized)


def seeded(count: int, **settings: object) -> list[Sampling]:
    return [Sampling(seed=seed, **settings) for seed in range(count)]  # type: ignore[arg-type]


def mixed_requests(parts: TinyParts, count: int = 9) -> tuple[list[Prompt], list[Sampling]]:
    """Every kind of end: stop tokens (at a high temperature), stop strings, lengths, the first token."""
    samplings = [
        Sampling(max_new_tokens=30, seed=1, temperature=2.0),
        Sampling(max_new_tokens=5, seed=2, temperature=0.5, top_k=9),
        Sampling(max_new_tokens=23, seed=3, top_p=0.8, min_p=0.01, stop=("e", "un")),
        Sampling(max_new_tokens=1, seed=4),
        Sampling(max_new_tokens=17, seed=5, temperature=0),
        Sampling(max_new_tokens=40, seed=6, temperature=3.0, stop=("t",)),
        Sampling(max_new_tokens=9, seed=7),
        Sampling(max_new_tokens=33, seed=8),
        Sampling(max_new_tokens=12, seed=9, temperature=1.3),
    ]
    return (mixed_prompts(parts) * 3)[:count], samplings[:count]


def same(first: Sequence[Completion], second: Sequence[Completion], atol: float = LOGPROB_TOLERANCE) -> bool:
    """True if two groups are the same, up to rounding of log-probs."""
    return all(
        a.token_ids_T.tolist() == b.token_ids_T.tolist()
        and (a.text, a.finish) == (b.text, b.finish)
        and np.allclose(a.logprobs_T, b.logprobs_T, atol=atol)
        for a, b in zip(first, second, strict=True)
    )
