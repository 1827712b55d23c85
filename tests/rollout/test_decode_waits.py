"""Prefill and decode steps on a GPU make the host wait for nothing: on torch's meta device (`tests.meta_device`).

The host waits once every few steps, where it looks which rows have finished (`DecodeBatch.wait_for_finished`), and where
rows go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fovea.models.decoder import decoder_shape
from fovea.models.trainable import factored_weights
from fovea.models.vlm import VLM
from fovea.rollout.embedded.batch import DecodeBatch
from fovea.rollout.embedded.decode_step import GraphStepper
from fovea.rollout.embedded.linears import NamedWeights, text_weights
from fovea.rollout.embedded.paged_cache import PagedCache
from fovea.rollout.embedded.prefill import prefill, prefill_row
from fovea.rollout.embedded.recorder import Recorder
from fovea.rollout.embedded.requests import QueuedRequest
from fovea.rollout.embedded.tuning import Tuning, make_cache, make_stepper
from fovea.rollout.outputs import CompletionText
from fovea.types import Request, Sampling
from tests.meta_device import META, NoPageableCopies
from tests.tiny_models import CPU, mixed_prompts, tiny

SAMPLINGS = (
    Sampling(max_new_tokens=8, seed=1),
    Sampling(max_new_tokens=4, seed=2, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1),
    Sampling(max_new_tokens=6, seed=3, temperature=0),
)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


class Reads(TorchFunctionMode):
    """Names of the calls for which the host of a GPU waits."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {Tensor.tolist, Tensor.item, Tensor.nonzero, Tensor.cpu, Tensor.__bool__, Tensor.__int__}:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_sync_reads_which_rows_have_finished_and_no_more(loop: asyncio.AbstractEventLoop) -> None:
    """Without stop strings; new rows read nothing."""
    parts = tiny("qwen3_vl")
    text = CompletionText(parts.processor.tokenizer, parts.processor.stop_ids)
    batch = DecodeBatch(CPU, torch.tensor(parts.processor.stop_ids), torch.tensor([0]), text)
    queued = QueuedRequest(
        request=Request(id="", prompt=mixed_prompts(parts)[2], sampling=Sampling(max_new_tokens=9), n=4),
        done=loop.create_future(),
        positions_3L=np.zeros((3, 1), dtype=np.int64),
        first_position=1,
    )
    with Reads() as adding:
        batch.add([[queued]], torch.randn(1, 300, generator=torch.Generator().manual_seed(0)))
    assert adding.names == []
    with Reads() as syncing:
        batch.wait_for_finished()
    assert syncing.names == ["tolist"]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_no_step_reads_the_device(family: str, loop: asyncio.AbstractEventLoop) -> None:
    parts = tiny(family)
    prompts, text = mixed_prompts(parts), CompletionText(parts.processor.tokenizer, parts.processor.stop_ids)
    vlm: VLM = VLM(parts.network.bfloat16(), parts.processor.banned_ids).to(META)
    shape = decoder_shape(vlm.text_config)
    weights = text_weights(NamedWeights(tensors=dict(factored_weights(vlm.network))), shape)
    cache = make_cache(Tuning(page_tokens=4), shape, weights.embed, num_tokens=10_000)
    assert isinstance(cache, PagedCache)
    requests = []
    for prompt, sampling in zip(prompts, SAMPLINGS, strict=True):
        positions_3L, first_position = vlm.family.positions(prompt.token_ids_L, prompt.images, 0)
        requests.append(
            QueuedRequest(
                request=Request(id=str(len(requests)), prompt=prompt, sampling=sampling, n=3),
                done=loop.create_future(),
                positions_3L=positions_3L,
                first_position=first_position,
            )
        )
    batch = DecodeBatch(META, torch.tensor(parts.processor.stop_ids, device=META), vlm.banned_K, text)
    with torch.no_grad():
        features = vlm.image_features([image for prompt in prompts for image in prompt.images])
        row = prefill_row(vlm, weights, requests, features)
        hidden_PE = prefill(row, weights, shape, requests, cache, Recorder(vlm, None))
        batch.add([[each] for each in requests], weights.logits(hidden_PE))
        stepper = make_stepper(vlm, weights, shape, cache)
        assert isinstance(stepper, GraphStepper)
        with NoPageableCopies():
            for _ in range(2):
                assert cache.reserve(batch.tokens_after(4)), "every row takes a page"
                batch.step(stepper)
    assert len(batch) == 9
