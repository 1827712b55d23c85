"""Episodes of ten turns with an image in each, against transformers' forward on the whole conversation.

The family internvl is one whose inputs transformers' processor makes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import SuppressTokensLogitsProcessor

from fovea.models.tiny import TinyParts
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.train.base import Needs
from fovea.types import Batch, Group, Prompt
from fovea_tools.families.tiny import save_tiny_kind
from tests.hub_models import Loaded, moving_difference
from tests.policies import make_policy, update_gradients
from tests.reference import gradients, reference_logprobs
from tests.rollout.drawing import make_engine
from tests.rollout.ten_turns import TURNS, Gallery, drawn_and_checked, ten_turns
from tests.rollout.two_turns import TEMPERATURE, batch_of
from tests.tiny_models import CORPUS, tiny

TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 1e-5
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl")
pytestmark = pytest.mark.parametrize("family", FAMILIES)


class Exchanged(Gallery):
    """A gallery with another picture after one of the turns."""

    exchanged = 1

    def seed_of(self, number: int) -> int:
        return super().seed_of(number) + 50 * (number == self.exchanged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A tiny model, and one with the same weights for transformers' forward."""

    parts: TinyParts
    twin: TinyParts

    def reference(self, prompt: Prompt, completion_T: NDArray[np.int64]) -> Tensor:
        """Log-probs [T] by transformers."""
        if not isinstance(self.twin, Loaded):
            return reference_logprobs(self.twin, prompt, completion_T, TEMPERATURE)
        ids = torch.from_numpy(np.concatenate([prompt.token_ids_L, completion_T]))[None]
        inputs = self.twin.processor.family.forward_inputs(ids, prompt.images)
        logits = self.twin.network(**inputs | {"input_ids": ids}, use_cache=False).logits[0, prompt.num_tokens - 1 : -1]
        suppress = SuppressTokensLogitsProcessor(self.twin.processor.banned_ids)
        logprobs = suppress(ids, logits / TEMPERATURE).log_softmax(-1)  # type: ignore[arg-type]
        return logprobs.gather(1, torch.from_numpy(completion_T)[:, None])[:, 0]

    def of_conversations(self, batch: Batch) -> list[Tensor]:
        """By transformers on each whole conversation, of the policy's own tokens."""
        return [
            self.reference(replace(group.prompt, images=group.prompt.images + sample.images), sample.token_ids_T)[
                torch.from_numpy(sample.mask_T)
            ]
            for group in batch.groups
            for sample in group.samples
        ]


@pytest.fixture
def pair(family: str, tmp_path: Path) -> Pair:
    if family != "internvl":
        return Pair(parts=tiny(family), twin=tiny(family))
    folder = save_tiny_kind(family, tmp_path / family, CORPUS)
    return Pair(parts=Loaded.of(folder), twin=Loaded.of(folder))


def engine_of(parts: TinyParts, cache: str) -> EmbeddedEngine:
    return make_engine(parts, cache=cache, **({"page_tokens": 16} if cache == "paged" else {}))


@pytest.mark.parametrize("cache", ["dense", "paged"])
def test_ids_only_grow_and_logprobs_equal_transformers(pair: Pair, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = drawn_and_checked(pair.parts, engine_of(pair.parts, cache), monkeypatch)
    trained = make_policy(pair.parts).compute_logprobs(batch, Needs(old_logprobs=True))
    with torch.no_grad():
        expected = pair.of_conversations(batch)
    for sample, reference, scored in zip(batch.samples, expected, trained.samples, strict=True):
        np.testing.assert_allclose(sample.rollout_logprobs_T[sample.mask_T], reference, atol=TOLERANCE)
        assert scored.old_logprobs_T is not None
        np.testing.assert_allclose(scored.old_logprobs_T[sample.mask_T], reference, atol=TOLERANCE)


def test_gradients_equal_transformers(pair: Pair) -> None:
    batch = batch_of(ten_turns(pair.parts, make_engine(pair.parts)))
    loss = torch.tensor(0.0)
    for sample, logprobs_A in zip(batch.samples, pair.of_conversations(batch), strict=True):
        assert sample.advantages_T is not None
        loss = loss - sample.weight * (torch.from_numpy(sample.advantages_T[sample.mask_T]) * logprobs_A).sum()
    torch.autograd.backward(loss)
    expected = gradients(pair.twin.network)
    policy = make_policy(pair.parts, lr_warmup_steps=0)
    found = {name.removeprefix("network."): x for name, x in update_gradients(policy, batch).items()}
    assert moving_difference(expected, found) < GRADIENT_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dense", "paged"])
def test_the_picture_after_a_turn_moves_what_follows_and_nothing_before(pair: Pair, cache: str) -> None:
    """In the engine, which draws the same ids until the picture, and in the trainer, on ids that are the same."""
    groups = ten_turns(pair.parts, engine_of(pair.parts, cache))
    batch, policy = batch_of(groups), make_policy(pair.parts)
    (before, _) = (sample.old_logprobs_T for sample in policy.compute_logprobs(batch, Needs(old_logprobs=True)).samples)
    spans = spans_of(groups[0])
    for turn in range(1, TURNS):
        kind = type("Other", (Exchanged,), {"exchanged": turn})
        other = ten_turns(pair.parts, engine_of(pair.parts, cache), kind)
        for one, two in zip(groups[0].episodes, other[0].episodes, strict=True):
            drawn_so_far = list(zip(one.tokens, two.tokens, strict=True))[:turn]
            for a, b in drawn_so_far:
                np.testing.assert_array_equal(a.completion.token_ids_T, b.completion.token_ids_T)
                np.testing.assert_array_equal(a.completion.logprobs_T, b.completion.logprobs_T)
            a, b = one.tokens[turn].completion, two.tokens[turn].completion
            assert a.token_ids_T[0] != b.token_ids_T[0] or abs(a.logprobs_T[0] - b.logprobs_T[0]) > TOLERANCE
        first = batch.groups[0].samples[0]
        images = list(first.images)
        images[turn - 1] = other[0].episodes[0].tokens[turn].observation.images[0]
        changed = replace(batch.groups[0], samples=(replace(first, images=tuple(images)), batch.groups[0].samples[1]))
        scored = policy.compute_logprobs(Batch(groups=(changed,)), Needs(old_logprobs=True)).samples[0].old_logprobs_T
        moved = np.abs(scored - before)
        assert moved[: spans[turn][0]].max() <= 1e-6, "a token before the picture"
        assert all(moved[start:end].max() > TOLERANCE for start, end in spans[turn:]), "a turn after the picture"


def spans_of(group: Group) -> list[tuple[int, int]]:
    """Where the turns of the first episode are in the tokens of its sample."""
    found, end = list[tuple[int, int]](), 0
    for number, turn in enumerate(group.episodes[0].tokens):
        start = end + (turn.observation.num_tokens if number else 0)
        end = start + len(turn.completion.token_ids_T)
        found.append((start, end))
    return found
