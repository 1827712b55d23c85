"""Dependence on pictures: differences of log-probs equal those by transformers."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from fovea.evaluation.answer_logprobs import answer_logprobs
from fovea.evaluation.controls import image_controls
from fovea.evaluation.dependence import dependence
from fovea.evaluation.records import AnsweredRow
from fovea.models.vlm import VLM
from fovea_gym.environments.shapes.environment import Shapes
from fovea_gym.settings.environments import ShapesEnvironment
from tests.environments.prompt_sources import opener, source_of
from tests.records import said
from tests.reference import reference_logprobs
from tests.tiny_models import renderer, tiny

ROWS = 8
TEMPERATURE = 0.7


def answered(index: int, tokens: tuple[int, ...]) -> AnsweredRow:
    return AnsweredRow(id=f"test/{index}", index=index, kind="all", answers=(said("said"),), token_ids=tokens)


@pytest.mark.parametrize("row_tokens", [16_384, 100, 1])
def test_dependence_is_that_of_transformers(row_tokens: int) -> None:
    parts = tiny("qwen3_vl")
    source = source_of(Shapes(ShapesEnvironment(test_size=ROWS), seed=0).tasks("test"), renderer(parts))
    # of different lengths; the last row has none, as that of a server
    rows = {f"test/{index}": answered(index, tuple(range(5, 5 + index))[::-1]) for index in range(1, ROWS)}
    rows["test/0"] = answered(0, ())
    vlm = VLM(parts.network, parts.processor.banned_ids)
    scores = partial(answer_logprobs, vlm, max_tokens=row_tokens, temperature=TEMPERATURE)
    others = image_controls(source, list(source.tasks), opener)
    for other, found in zip(others, dependence(source, others, rows, scores), strict=True):
        assert set(found) == set(rows) - {"test/0"}
        for task in other.tasks:
            if task.id == "test/0":
                continue
            answer_T = np.array(rows[task.id].token_ids)
            prompts = (source.get(rows[task.id].index), other.render(task))
            true, changed = (
                float(reference_logprobs(parts, item.prompt, answer_T, TEMPERATURE).sum().detach())
                for item in prompts
                if item is not None
            )
            assert found[task.id] == pytest.approx((true - changed) / len(answer_T), abs=1e-4)
        assert max(map(abs, found.values())) > 1e-3, "a tiny model reads its picture"
