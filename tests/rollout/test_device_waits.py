"""How often the host waits for a GPU in whole rollouts, counted on the meta device (`tests.meta_device`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest

from fovea.models.vlm import VLM
from fovea.rollout.embedded.decode_step import GraphStepper
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.rollout.embedded.paged_cache import PagedCache
from fovea.rollout.embedded.tuning import Tuning
from fovea.types import Completion, Request, Sampling
from tests.meta_device import META, PretendedDevice
from tests.rollout.drawing import noted_init, together
from tests.tiny_models import mixed_prompts, tiny

ROWS = 8
"""Completions of each of the three prompts."""
TRAINING, EVALUATION = Sampling(max_new_tokens=256), Sampling(max_new_tokens=256, temperature=0)
ALL_NEEDS = Sampling(max_new_tokens=256, temperature=0.7, top_k=20, top_p=0.9, min_p=0.05)


def engine_on_meta(family: str = "qwen3_vl") -> EmbeddedEngine:
    """An engine whose rows take a page every few steps."""
    parts = tiny(family)
    vlm = VLM(parts.network.bfloat16(), parts.processor.banned_ids).to(META).eval()
    tuning = Tuning(decode_steps_per_wait=8, page_tokens=4)
    engine = EmbeddedEngine(vlm, parts.processor, max_batch_tokens=100_000, tuning=tuning)
    engine.load_weights(dict(engine.own_weights()), 0)
    return engine


def requests(*samplings: Sampling, family: str = "qwen3_vl", **more: Any) -> list[Request]:
    """A request per prompt; a single sampling is that of all of them."""
    each = zip(mixed_prompts(tiny(family)), samplings * (3 // len(samplings)), strict=True)
    return [Request(id=str(i), prompt=p, sampling=replace(s, seed=i), n=ROWS, **more) for i, (p, s) in enumerate(each)]


def rollout(
    engine: EmbeddedEngine, asked: Sequence[Request], syncs: int
) -> tuple[list[Sequence[Completion]], Counter[str]]:
    """Completions of all requests, which end at once at this sync, and the waits by the line that waits."""
    with PretendedDevice(chain(repeat(True, syncs - 1), repeat(False))) as device:
        return together(engine, asked), device.waits


@pytest.mark.parametrize(
    ("family", "samplings"),
    [
        ("qwen3_vl", [TRAINING]),
        ("qwen3_vl", [EVALUATION]),
        ("qwen3_vl", [ALL_NEEDS]),
        ("qwen2_5_vl", [TRAINING, ALL_NEEDS, EVALUATION]),
    ],
    ids=["training", "evaluation", "all needs", "mixed"],
)
@pytest.mark.parametrize("syncs", [1, 5])
def test_a_rollout_waits_once_a_sync_and_twice_for_what_ended(
    family: str, samplings: list[Sampling], syncs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of rows, prompts and tokens make no difference, and nothing is copied from pageable memory.

    A sync reads which rows have finished; new rows read nothing.
    """
    made: list[type] = []
    for kind in (GraphStepper, PagedCache):
        monkeypatch.setattr(kind, "__init__", noted_init(kind, made))
    completions, waits = rollout(engine_on_meta(family), requests(*samplings, family=family), syncs)
    assert made == [PagedCache, GraphStepper][:syncs], "as on a GPU; the first sync comes before the first step"
    assert [len(each) for each in completions] == [ROWS] * 3
    assert sorted(waits.values()) == sorted([2, syncs]), waits


def test_a_second_turn_waits_as_a_first_one_does() -> None:
    engine = engine_on_meta()
    first, kept = rollout(engine, requests(TRAINING, keep=True), syncs=1)
    assert sum(kept.values()) == 1 + 2 + 1, "one for the lengths of all that is kept"
    turns = [
        replace(
            request,
            id=f"{request.id}/second",
            prompt=replace(request.prompt, token_ids_L=np.append(request.prompt.token_ids_L, [1, 5, 6])),
            continues=completions[0].id,
        )
        for request, completions in zip(requests(TRAINING), first, strict=True)
    ]
    _, waits = rollout(engine, turns, syncs=2)
    assert sum(waits.values()) == 2 + 2, waits


def test_weights_of_the_same_memory_wait_for_nothing() -> None:
    engine = engine_on_meta()
    with PretendedDevice() as device:
        engine.load_weights(dict(engine.own_weights()), 1)
    assert not device.waits
