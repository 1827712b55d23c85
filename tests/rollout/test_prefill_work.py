"""The count of prefill against what torch counts while an engine draws one token of several completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fovea.models.tiny import TinyParts
from fovea.rollout.base import CountsPrefill
from tests.rollout.drawing import generate, make_engine, plain_engine, seeded
from tests.tiny_models import renderer, tiny, user

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
