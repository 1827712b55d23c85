"""Prefill: how prompts are split into passes, the count of its work, and equal conversations prefilled once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fovea.models.tiny import TinyParts
from fovea.rollout.base import CountsPrefill
from fovea.rollout.collect import extended
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.rollout.embedded.prefill import prompt_passes
from fovea.types import Completion, Prompt, Request, Sampling
from fovea_gym.types import ImageRef
from fovea_gym.utils.event_loop import wait_for
from gym_tests.tables import table
from tests.reference import reference_logprobs
from tests.rollout.drawing import generate, make_engine, plain_engine, seeded, together
from tests.tiny_models import image, renderer, tiny, user


@table(
    ("lengths", "starts", "passes"),
    [
        ([4, 4, 4], [0, 0, 0], [[(5, 0, 4), (6, 0, 4)], [(7, 0, 4)]]),
        # new tokens of later turns share a pass, but not with whole prompts
        ([24, 23, 4, 4, 22], [20, 20, 0, 0, 20], [[(5, 20, 24), (6, 20, 23)], [(7, 0, 4), (8, 0, 4)], [(9, 20, 22)]]),
        # more than fit into a pass, at the beginning and after kept tokens
        ([10, 31, 23], [0, 20, 20], [[(5, 0, 8)], [(5, 8, 10)], [(6, 20, 28)], [(6, 28, 31)], [(7, 20, 23)]]),
    ],
)
def test_passes(lengths: list[int], starts: list[int], passes: list[list[tuple[int, int, int]]]) -> None:
    found = prompt_passes(lengths, 5, 8, starts)
    assert [[(span.prompt, span.start, span.end) for span in spans] for spans in found] == passes


TERA = 1e12
MATRIX_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)


@pytest.mark.parametrize("make", [make_engine, plain_engine])
def test_a_prompt_is_run_once_for_its_completions(make: Callable[[TinyParts], Any]) -> None:
    parts = tiny("qwen3_vl")
    engine, work = make(parts), parts.processor.family.work
    assert isinstance(engine, CountsPrefill)
    prompt = renderer(parts).prompt(user("How many circles are there?"))
    tokens, counted = prompt.num_tokens, []
    for n in (1, 4):
        with FlopCounterMode(display=False) as counter:
            generate(engine, [prompt], seeded(1, max_new_tokens=1), n=n)
        products = counter.get_flop_counts()["Global"]
        counted.append(sum(flops for op, flops in products.items() if op in MATRIX_PRODUCTS))
        found = engine.prefill_metrics()
        pairs = tokens * (tokens + 1) // 2 * work.pair
        assert found["rollout_prefill_tflop"] * TERA == pytest.approx(tokens * work.token + pairs)
        assert found["rollout_prefill_copies_tflop"] == pytest.approx(n * found["rollout_prefill_tflop"])
    assert counted[0] == counted[1]
    heads = (counted[0] - tokens * work.token) / work.action
    assert heads in (1, tokens), "logits of the last token, or of all"
    assert set(engine.prefill_metrics().values()) == {0.0}


TOLERANCE = 1e-5
"""Of log-probs in float32, whose rounding follows the number of rows."""
WORK = "rollout_prefill_tflop"


def observed(parts: TinyParts, answer: Completion, *reply: str | ImageRef) -> Prompt:
    return renderer(parts).observation(user(*reply), after=int(answer.token_ids_T[-1]))


def first_answers(parts: TinyParts, engine: EmbeddedEngine) -> list[Request]:
    """Requests that continue three equal answers: two with the same reply, one with another picture."""
    prompt = renderer(parts).prompt(user(image(1), "How many circles?"))
    first = Request(id="first", prompt=prompt, sampling=Sampling(max_new_tokens=5, temperature=0), n=3, keep=True)
    answers = wait_for(engine.generate(first))
    engine.prefill_metrics()
    found = []
    for number, answer in enumerate(answers):
        sampling = Sampling(max_new_tokens=20, seed=number)
        observation = observed(parts, answer, image(2 + number // 2), "And now?")
        grown = extended(prompt, answer.token_ids_T, observation)
        found.append(Request(id=f"{number}", prompt=grown, sampling=sampling, keep=True, continues=answer.id))
    return found


@pytest.mark.parametrize(
    ("family", "cache"), [("qwen3_vl", "dense"), ("qwen3_vl", "paged"), ("qwen2_5_vl", "dense"), ("qwen3_5", "dense")]
)
def test_equal_later_turns_are_prefilled_once_and_drawn_as_if_by_themselves(family: str, cache: str) -> None:
    parts = tiny(family)
    engine = make_engine(parts, cache=cache, page_tokens=16)
    requests = first_answers(parts, engine)
    once, sampled = list[float](), list[Completion]()
    for request in requests:
        sampled += wait_for(engine.generate(replace(request, id=f"{request.id} by itself")))
        once.append(engine.prefill_metrics()[WORK])
    shared = [completion for (completion,) in together(engine, requests)]
    work = engine.prefill_metrics()
    assert work[WORK] == pytest.approx(once[0] + once[2])
    assert work["rollout_prefill_copies_tflop"] == pytest.approx(sum(once))
    assert shared[0].token_ids_T.tolist() != shared[1].token_ids_T.tolist()
    for one, other in zip(sampled, shared, strict=True):
        np.testing.assert_array_equal(one.token_ids_T, other.token_ids_T)
    # each of them goes on from its own keys
    later = [
        replace(
            request,
            id=f"{request.id}/later",
            prompt=extended(request.prompt, answer.token_ids_T, observed(parts, answer, "?")),
            continues=answer.id,
        )
        for request, answer in zip(requests, shared, strict=True)
    ]
    after = [completion for (completion,) in together(engine, later)]
    for request, answer in zip([*requests, *later], [*shared, *after], strict=True):
        with torch.no_grad():
            expected = reference_logprobs(parts, request.prompt, answer.token_ids_T)
        np.testing.assert_allclose(answer.logprobs_T, expected, atol=TOLERANCE)
