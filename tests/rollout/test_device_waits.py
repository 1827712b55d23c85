"""How often the host waits for a GPU in whole rollouts, counted on the meta device (`tests.meta_device`)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fovea.models.vlm import VLM
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.rollout.embedded.tuning import Tuning
from fovea.types import Completion, Request, Sampling
from fovea_gym.utils.event_loop import wait_for
from tests.meta_device import META, PretendedDevice
from tests.tiny_models import mixed_prompts, tiny

ROWS = 8
"""Completions of each of the three prompts."""


def engine_on_meta(family: str = "qwen3_vl") -> EmbeddedEngine:
    parts = tiny(family)
    vlm = VLM(parts.network.bfloat16(), parts.processor.banned_ids).to(META).eval()
    tuning = Tuning(decode_steps_per_wait=8)
    engine = EmbeddedEngine(vlm, parts.processor, max_batch_tokens=100_000, tuning=tuning)
    engine.load_weights(dict(engine.own_weights()), 0)
    return engine


def requests(sampling: Sampling, family: str = "qwen3_vl", **more: object) -> list[Request]:
    prompts = mixed_prompts(tiny(family))
    return [
        Request(id=str(i), prompt=prompt, sampling=replace(sampling, seed=i), n=ROWS, **more)  # type: ignore[arg-type]
        for i, prompt in enumerate(prompts)
    ]


def rollout(
    engine: EmbeddedEngine, asked: Sequence[Request], syncs: int
) -> tuple[list[Sequence[Completion]], Counter[str]]:
    """Completions of all requests, which end at once at this sync, and the waits by the line that waits."""

    async def all_of_them() -> list[Sequence[Completion]]:
        return await asyncio.gather(*map(engine.generate, asked))

    with PretendedDevice(chain(repeat(True, syncs - 1), repeat(False))) as device:
        return wait_for(all_of_them()), device.waits


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=256),
        Sampling(max_new_tokens=256, temperature=0),
        Sampling(max_new_tokens=256, temperature=0.7, top_k=20, top_p=0.9, min_p=0.05),
    ],
    ids=["training", "evaluation", "all needs"],
)
@pytest.mark.parametrize("syncs", [1, 5])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_a_rollout_waits_once_a_sync_and_twice_for_what_ended(sampling: Sampling, syncs: int, family: str) -> None:
    """Numbers of rows, prompts and tokens make no difference, and nothing is copied from pageable memory."""
    completions, waits = rollout(engine_on_meta(family), requests(sampling, family), syncs)
    assert [len(each) for each in completions] == [ROWS] * 3
    assert sorted(waits.values()) == sorted([2, syncs]), waits


def second_turns(asked: Sequence[Request], first: Sequence[Sequence[Completion]]) -> list[Request]:
    """Requests that continue the first completion of each of these."""
    return [
        replace(
            request,
            id=f"{request.id}/second",
            prompt=replace(request.prompt, token_ids_L=np.append(request.prompt.token_ids_L, [1, 5, 6])),
            keep=False,
            continues=completions[0].id,
        )
        for request, completions in zip(asked, first, strict=True)
    ]


def test_a_second_turn_waits_as_a_first_one_does() -> None:
    engine = engine_on_meta()
    first, kept = rollout(engine, requests(Sampling(max_new_tokens=256), keep=True), syncs=1)
    assert sum(kept.values()) == 1 + 2 + 1, "one for the lengths of all that is kept"
    turns = second_turns(requests(Sampling(max_new_tokens=256)), first)
    _, waits = rollout(engine, turns, syncs=2)
    assert sum(waits.values()) == 2 + 2, waits


class Launches(TorchDispatchMode):
    """Counts the operators on tensors of the device, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) and out else out
        self.count += isinstance(first, Tensor) and first.device == META and not first._is_view()
        return out


def test_later_turns_launch_as_much_for_many_conversations_as_for_one() -> None:
    """Attention of each conversation was several operators per layer: 0.2 seconds a turn of 64 conversations."""
    found = []
    for number in (1, 1, 3):  # the first also tries the kernels
        engine = engine_on_meta()
        asked = requests(Sampling(max_new_tokens=256), keep=True)[:number]
        first, _ = rollout(engine, asked, syncs=1)
        with Launches() as launches:
            rollout(engine, second_turns(asked, first), syncs=1)
        found.append(launches.count)
    assert found[1] == found[2]


def test_weights_of_the_same_memory_wait_for_nothing() -> None:
    engine = engine_on_meta()
    with PretendedDevice() as device:
        engine.load_weights(dict(engine.own_weights()), 1)
    assert not device.waits
