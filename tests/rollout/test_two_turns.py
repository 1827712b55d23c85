"""Episodes of two turns: tokens that only grow, keys that are kept, and log-probs and gradients of transformers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fovea.config.algorithm import Algorithm
from fovea.models.plain import PlainVLM
from fovea.models.varlen import Pairs, PlainSegments, Triple
from fovea.models.vlm import VLM
from fovea.rollout.collect import extended
from fovea.rollout.embedded import prefill
from fovea.rollout.embedded.batch import DecodeBatch
from fovea.rollout.embedded.paged_cache import PagedCache
from fovea.rollout.embedded.prefill import PrefillRow
from fovea.samples import replace_samples
from fovea.train.base import Needs
from fovea.train.torch.policy import TorchPolicy
from fovea_gym.types import Message, Task, Turn
from tests.policies import make_policy, train_settings, update_gradients
from tests.reference import gradients, largest_relative_difference
from tests.rollout.drawing import make_engine
from tests.rollout.two_turns import (
    TEMPERATURE,
    LooksTwice,
    assert_same_turns,
    batch_of,
    environment,
    sampled,
    whole_logprobs,
)
from tests.tiny_models import FAMILIES, renderer, tiny

TOLERANCE = 1e-5


@pytest.mark.parametrize("cache", ["dense", "paged"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_all_turns_equal_transformers_on_the_whole_conversation(family: str, cache: str) -> None:
    parts = tiny(family)
    engine = make_engine(parts, cache=cache, **({"page_tokens": 16} if cache == "paged" else {}))
    groups = sampled(parts, engine)
    samples = batch_of(groups).samples
    assert all(len(sample.images) == 2 and len(sample.completion_ids) == 3 for sample in samples)
    episodes = [episode for group in groups for episode in group.episodes]
    assert [episode.num_action_tokens for episode in episodes] == [sample.num_actions for sample in samples]
    trained = make_policy(parts).compute_logprobs(batch_of(groups), Needs(old_logprobs=True))
    with torch.no_grad():
        expected = whole_logprobs(parts, batch_of(groups))
    for sample, reference, scored in zip(samples, expected, trained.samples, strict=True):
        np.testing.assert_allclose(sample.rollout_logprobs_T[sample.mask_T], reference, atol=TOLERANCE)
        assert scored.old_logprobs_T is not None
        np.testing.assert_allclose(scored.old_logprobs_T[sample.mask_T], reference, atol=TOLERANCE)
        assert not scored.old_logprobs_T[~sample.mask_T].any()


class AnswersOfATool(LooksTwice):
    """The pictures of later turns come in messages of the role `tool`."""

    def reply(self, task: Task, turns: Sequence[Turn]) -> Sequence[Message] | None:
        reply = super().reply(task, turns)
        return reply and [replace(message, role="tool", tool="zoom") for message in reply]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("kind", [LooksTwice, AnswersOfATool])
def test_pictures_of_later_turns_are_read_in_their_places(kind: type[LooksTwice], family: str) -> None:
    """As many pads as the pictures have tokens, transformers' log-probs, and not those with two pictures exchanged."""
    parts = tiny(family)
    groups = sampled(parts, make_engine(parts), asked=environment(kind))
    batch = batch_of(groups)
    for group in batch.groups:
        for sample in group.samples:
            ids = np.concatenate([group.prompt.token_ids_L, sample.token_ids_T])
            num_tokens = sum(image.num_tokens for image in (*group.prompt.images, *sample.images))
            assert np.count_nonzero(ids == parts.processor.family.image_token_id) == num_tokens
            assert not np.isin(sample.token_ids_T[sample.mask_T], parts.processor.banned_ids).any()
    exchanged = replace_samples(batch, lambda sample: replace(sample, images=sample.images[::-1]))
    with torch.no_grad():
        expected, others = whole_logprobs(parts, batch), whole_logprobs(parts, exchanged)
    for sample, reference, other in zip(batch.samples, expected, others, strict=True):
        rolled_A = sample.rollout_logprobs_T[sample.mask_T]
        np.testing.assert_allclose(rolled_A, reference, atol=TOLERANCE)
        assert (reference - other)[-1].abs() > 10 * TOLERANCE, "the picture of the turn before counts"


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_transformers_on_whole_conversations(family: str) -> None:
    parts = tiny(family)
    groups = sampled(parts, make_engine(parts))
    batch = batch_of(groups)
    policy = make_policy(parts, lr_warmup_steps=0)
    # on-policy: the gradient of the loss is that of - weight * advantage * log-prob, summed over actions
    loss = torch.tensor(0.0)
    for sample, logprobs_A in zip(batch.samples, whole_logprobs(parts, batch_of(groups)), strict=True):
        assert sample.advantages_T is not None
        loss = loss - sample.weight * (torch.from_numpy(sample.advantages_T[sample.mask_T]) * logprobs_A).sum()
    torch.autograd.backward(loss)
    expected = gradients(parts.network)
    found = {name.removeprefix("network."): x for name, x in update_gradients(policy, batch).items()}
    assert largest_relative_difference(expected, found) < 2e-5


def test_kept_keys_are_not_prefilled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that go through prefill: prompts and observations once, and the last token of each turn before."""
    parts = tiny("qwen3_vl")
    engine = make_engine(parts)
    prefilled: list[int] = []
    part = PrefillRow.part

    def counted(self: PrefillRow, start: int, end: int) -> PrefillRow:
        prefilled.append(end - start)
        return part(self, start, end)

    monkeypatch.setattr(PrefillRow, "part", counted)
    groups = sampled(parts, engine)
    turns = [turn for group in groups for episode in group.episodes for turn in episode.tokens[1:]]
    prompts = sum(group.prompt.num_tokens for group in groups)
    assert sum(prefilled) == prompts + sum(turn.observation.num_tokens + 1 for turn in turns)


def test_requests_that_wait_or_run_hold_no_keys_beyond_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an evicted turn are freed, though a request that continues it waits."""
    parts = tiny("qwen3_vl")
    roomy = sampled(parts, make_engine(parts))
    longest = max(
        g.prompt.num_tokens + sum(t.observation.num_tokens + len(t.completion.token_ids_T) for t in e.tokens)
        for g in roomy
        for e in g.episodes
    )
    engine = make_engine(parts, 2 * longest, cache="paged", page_tokens=16)
    copied: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []
    copy, step = PagedCache.copy_row, DecodeBatch.step

    def noted(cache: PagedCache, row: int, tokens: int) -> list[torch.Tensor]:
        layers = copy(cache, row, tokens)
        copied.append(weakref.ref(layers[0]))
        return layers

    def stepped(batch: DecodeBatch, *arguments: Any) -> None:
        held.append(sum(layer.shape[2] for ref in copied if (layer := ref()) is not None))
        step(batch, *arguments)

    monkeypatch.setattr(PagedCache, "copy_row", noted)
    monkeypatch.setattr(DecodeBatch, "step", stepped)
    assert_same_turns(roomy, sampled(parts, engine))
    assert 0 < max(held) <= 2 * longest


def test_without_kept_keys_the_same_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow twin: an engine that forgets computes every turn from its whole conversation."""
    parts = tiny("qwen2_5_vl")
    keeps, forgets = make_engine(parts), make_engine(parts)
    generate = forgets.generate
    forgets.generate = lambda request: generate(replace(request, keep=False, continues=None))  # type: ignore[method-assign]
    assert_same_turns(sampled(parts, keeps), sampled(parts, forgets))


@pytest.mark.parametrize("cache", ["paged", "dense"])
def test_later_turns_of_all_conversations_attend_in_one_call_per_layer(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, here by the plain twin of its kernel: the same is sampled as by one call for each conversation."""
    parts = tiny("qwen3_vl")
    one_by_one = sampled(parts, make_engine(parts, cache=cache))
    calls: list[Pairs] = []
    forward = PlainSegments.forward

    def noted(attention: PlainSegments, inputs: Triple, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(pairs)
        return forward(attention, inputs, pairs)

    monkeypatch.setattr(PlainSegments, "forward", noted)
    monkeypatch.setattr(prefill, "fastest_kernel", lambda _heads: "varlen")
    assert_same_turns(one_by_one, sampled(parts, make_engine(parts, cache=cache)))
    layers = parts.network.config.text_config.num_hidden_layers
    passes = [layer.queries.lengths for layer in calls[::layers]]
    assert len(calls) == layers * len(passes)
    assert max(map(len, passes)) == 6, "2 prompts of 3 conversations each"


@pytest.mark.parametrize("stopped", [True, False])
def test_an_observation_is_what_the_template_writes_between_two_answers(stopped: bool) -> None:
    parts = tiny("qwen3_vl")
    render, tokenizer = renderer(parts), parts.processor.tokenizer
    asked = environment()
    task = asked.tasks("train")[0]
    reply = asked.reply(task, [Turn(messages=(), text=r"\crop{1}")])
    assert reply is not None
    prompt = render.prompt(asked.prompt(task))
    answer = list(render.target(r"\crop{1}"))[: None if stopped else -1]
    observation = render.observation(reply, after=answer[-1])
    conversation = [*asked.prompt(task), Message(role="assistant", parts=(r"\crop{1}",)), *reply]
    whole = render.prompt(conversation)
    grown = extended(prompt, np.array(answer), observation)
    np.testing.assert_array_equal(grown.token_ids_L, whole.token_ids_L)
    np.testing.assert_array_equal(grown.unexpanded_ids_U, whole.unexpanded_ids_U)
    assert [image.key for image in grown.images] == [image.key for image in whole.images]
    assert tokenizer.decode([answer[-1]]) == "<|im_end|>" or not stopped


def test_the_plain_path_gives_the_same_logprobs_for_later_turns() -> None:
    parts = tiny("qwen3_vl")
    groups = sampled(parts, make_engine(parts))
    batch = batch_of(groups)
    plain = PlainVLM(tiny("qwen3_vl").network, parts.processor.banned_ids)
    vlms = (VLM(parts.network, parts.processor.banned_ids), plain)
    settings = {"train": train_settings(), "algorithm": Algorithm(), "temperature": TEMPERATURE, "max_steps": 10}
    scored = [TorchPolicy(vlm, **settings).logprobs(batch) for vlm in vlms]
    for fast, slow in zip(*scored, strict=True):
        np.testing.assert_allclose(fast, slow, atol=TOLERANCE)
