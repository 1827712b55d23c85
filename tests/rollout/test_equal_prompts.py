"""Later turns with equal conversations are prefilled once, and sampled as each is without the others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from fovea.models.tiny import TinyParts
from fovea.rollout.collect import extended
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.types import Completion, Request, Sampling
from fovea_gym.utils.event_loop import wait_for
from tests.reference import reference_logprobs
from tests.rollout.drawing import make_engine
from tests.tiny_models import image, renderer, tiny, user

TOLERANCE = 1e-5
"""Of log-probs in float32, whose rounding follows the number of rows."""
WORK = "rollout_prefill_tflop"


def first_answers(parts: TinyParts, engine: EmbeddedEngine) -> list[Request]:
    """Requests that continue three equal answers: two with the same reply, one with another picture."""
    prompt = renderer(parts).prompt(user(image(1), "How many circles?"))
    first = Request(id="first", prompt=prompt, sampling=Sampling(max_new_tokens=5, temperature=0), n=3, keep=True)
    answers = wait_for(engine.generate(first))
    engine.prefill_metrics()
    found = []
    for number, answer in enumerate(answers):
        reply = user(image(2 + number // 2), "And now?")
        observation = renderer(parts).observation(reply, after=int(answer.token_ids_T[-1]))
        sampling = Sampling(max_new_tokens=20, seed=number)
        grown = extended(prompt, answer.token_ids_T, observation)
        found.append(Request(id=f"{number}", prompt=grown, sampling=sampling, keep=True, continues=answer.id))
    return found


def together(engine: EmbeddedEngine, requests: Sequence[Request]) -> list[Completion]:
    async def asked() -> list[Sequence[Completion]]:
        return await asyncio.gather(*map(engine.generate, requests))

    return [completion for (completion,) in wait_for(asked())]


@pytest.mark.parametrize(
    ("family", "cache"), [("qwen3_vl", "dense"), ("qwen3_vl", "paged"), ("qwen2_5_vl", "dense"), ("qwen3_5", "dense")]
)
def test_equal_later_turns_are_prefilled_once_and_drawn_as_if_by_themselves(family: str, cache: str) -> None:
    parts = tiny(family)
    engine = make_engine(parts, cache=cache, **({"page_tokens": 16} if cache == "paged" else {}))
    requests = first_answers(parts, engine)
    once: list[float] = []
    sampled = []
    for request in requests:
        sampled += together(engine, [replace(request, id=f"{request.id} by itself")])
        once.append(engine.prefill_metrics()[WORK])
    shared = together(engine, requests)
    work = engine.prefill_metrics()
    assert work[WORK] == pytest.approx(once[0] + once[2])
    assert work["rollout_prefill_copies_tflop"] == pytest.approx(sum(once))
    assert shared[0].token_ids_T.tolist() != shared[1].token_ids_T.tolist()
    for request, one, other in zip(requests, sampled, shared, strict=True):
        np.testing.assert_array_equal(one.token_ids_T, other.token_ids_T)
        with torch.no_grad():
            expected = reference_logprobs(parts, request.prompt, other.token_ids_T)
        np.testing.assert_allclose(other.logprobs_T, expected, atol=TOLERANCE)
    # each of them goes on from its own keys
    later = [
        replace(
            request,
            id=f"{request.id}/later",
            prompt=extended(
                request.prompt,
                answer.token_ids_T,
                renderer(parts).observation(user("?"), after=int(answer.token_ids_T[-1])),
            ),
            continues=answer.id,
        )
        for request, answer in zip(requests, shared, strict=True)
    ]
    for request, answer in zip(later, together(engine, later), strict=True):
        with torch.no_grad():
            expected = reference_logprobs(parts, request.prompt, answer.token_ids_T)
        np.testing.assert_allclose(answer.logprobs_T, expected, atol=TOLERANCE)
