"""Episodes of several turns: ids that only grow, keys that are kept, and log-probs and gradients of transformers."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fovea.models.render import Renderer
from fovea.models.tiny import TinyParts
from fovea.models.varlen import Pairs, PlainSegments, Triple
from fovea.rollout.agent_conversations import AgentConversations, AgentTurn
from fovea.rollout.collect import extended
from fovea.rollout.embedded import prefill
from fovea.rollout.embedded.batch import DecodeBatch
from fovea.rollout.embedded.paged_cache import PagedCache
from fovea.rollout.embedded.prefill import PrefillRow
from fovea.samples import replace_samples
from fovea.train.base import Needs
from fovea.types import Batch, Sampling
from fovea_gym.environments.base import Session
from fovea_gym.environments.sessions import LimitedSessions
from fovea_gym.errors import BadRowError
from fovea_gym.rows.images import ImageOpener
from fovea_gym.settings.splits import SessionLimits
from fovea_gym.types import ImageRef, Message, Role, Task, Turn
from fovea_gym.utils.event_loop import wait_for
from fovea_tools.families.tiny import save_tiny_kind
from gym_tests.images import encoded, noise
from tests.hub_models import Loaded, moving_difference
from tests.policies import make_policy, update_gradients
from tests.reference import gradients, largest_relative_difference, reference_logprobs
from tests.rollout.drawing import make_engine, noted
from tests.rollout.two_turns import (
    TURNS,
    Gallery,
    LooksTwice,
    assert_same_turns,
    batch_of,
    drawn_and_checked,
    environment,
    longest_tokens,
    sampled,
    ten_turns,
    whole_logprobs,
)
from tests.tiny_models import CORPUS, FAMILIES, renderer, tiny

TOLERANCE = 2e-5
PAGED = {"cache": "paged", "page_tokens": 16}


class Pair(NamedTuple):
    """A tiny model, and one with the same weights for transformers' forward."""

    parts: TinyParts
    twin: TinyParts


@pytest.fixture(params=(*FAMILIES, "internvl"))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    """Of each family; transformers' processor makes the inputs of internvl."""
    if request.param != "internvl":
        return Pair(tiny(request.param), tiny(request.param))
    folder = save_tiny_kind(request.param, tmp_path / request.param, CORPUS)
    return Pair(Loaded.of(folder), Loaded.of(folder))


@pytest.mark.parametrize("cache", [{}, PAGED], ids=["dense", "paged"])
def test_ids_only_grow_and_logprobs_equal_transformers(
    pair: Pair, cache: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = drawn_and_checked(pair.parts, make_engine(pair.parts, **cache), monkeypatch)
    batch = batch_of(groups)
    episodes = [episode for group in groups for episode in group.episodes]
    assert [episode.num_action_tokens for episode in episodes] == [sample.num_actions for sample in batch.samples]
    trained = make_policy(pair.parts).compute_logprobs(batch, Needs(old_logprobs=True))
    with torch.no_grad():
        expected = whole_logprobs(pair.twin, batch)
    for sample, reference, scored in zip(batch.samples, expected, trained.samples, strict=True):
        np.testing.assert_allclose(sample.rollout_logprobs_T[sample.mask_T], reference, atol=TOLERANCE)
        assert scored.old_logprobs_T is not None
        np.testing.assert_allclose(scored.old_logprobs_T[sample.mask_T], reference, atol=TOLERANCE)
        assert not scored.old_logprobs_T[~sample.mask_T].any()


def test_gradients_equal_transformers_on_whole_conversations(pair: Pair) -> None:
    """On-policy: the gradient of the loss is that of - weight * advantage * log-prob, summed over actions."""
    batch = batch_of(sampled(pair.parts, make_engine(pair.parts)))
    loss = torch.tensor(0.0)
    for sample, logprobs_A in zip(batch.samples, whole_logprobs(pair.twin, batch), strict=True):
        assert sample.advantages_T is not None
        loss = loss - sample.weight * (torch.from_numpy(sample.advantages_T[sample.mask_T]) * logprobs_A).sum()
    torch.autograd.backward(loss)
    policy = make_policy(pair.parts, lr_warmup_steps=0)
    found = {name.removeprefix("network."): x for name, x in update_gradients(policy, batch).items()}
    difference = moving_difference if isinstance(pair.twin, Loaded) else largest_relative_difference
    assert difference(gradients(pair.twin.network), found) < 1e-5


@pytest.mark.parametrize("cache", [{}, pytest.param(PAGED, marks=pytest.mark.slow)], ids=["dense", "paged"])
@pytest.mark.parametrize(
    "pair",
    [
        "qwen3_vl",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen2_vl", "qwen2_5_vl", "qwen3_5", "internvl")),
    ],
    indirect=True,
)
def test_the_picture_after_a_turn_moves_what_follows_and_nothing_before(pair: Pair, cache: dict[str, Any]) -> None:
    """In the engine, which draws the same ids until the picture, and in the trainer, on ids that are the same."""
    (group,) = ten_turns(pair.parts, make_engine(pair.parts, **cache))
    policy, samples = make_policy(pair.parts), batch_of([group]).groups[0].samples

    def scored(images: Sequence[Any]) -> np.ndarray:
        changed = replace(batch_of([group]).groups[0], samples=(replace(samples[0], images=tuple(images)), samples[1]))
        found = policy.compute_logprobs(Batch(groups=(changed,)), Needs(old_logprobs=True)).samples[0].old_logprobs_T
        assert found is not None
        return found

    before, spans, end = scored(samples[0].images), list[tuple[int, int]](), 0
    for number, turn in enumerate(group.episodes[0].tokens):  # where the turns are in the tokens of the sample
        start = end + (turn.observation.num_tokens if number else 0)
        end = start + len(turn.completion.token_ids_T)
        spans.append((start, end))
    for place in range(1, TURNS):
        kind = type("Exchanged", (Gallery,), {"exchanged": place, "max_turns": place + 1})
        (other,) = ten_turns(pair.parts, make_engine(pair.parts, **cache), kind)
        for one, two in zip(group.episodes, other.episodes, strict=True):
            for a, b in zip(one.tokens[:place], two.tokens[:place], strict=True):
                np.testing.assert_array_equal(a.completion.token_ids_T, b.completion.token_ids_T)
                np.testing.assert_array_equal(a.completion.logprobs_T, b.completion.logprobs_T)
            a, b = one.tokens[place].completion, two.tokens[place].completion
            assert a.token_ids_T[0] != b.token_ids_T[0] or abs(a.logprobs_T[0] - b.logprobs_T[0]) > TOLERANCE
        images = list(samples[0].images)
        images[place - 1] = other.episodes[0].tokens[place].observation.images[0]
        moved = np.abs(scored(images) - before)
        assert moved[: spans[place][0]].max() <= 1e-6, "a token before the picture"
        assert all(moved[start:end].max() > TOLERANCE for start, end in spans[place:]), "a turn after the picture"


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
    batch = batch_of(sampled(parts, make_engine(parts), asked=environment(kind)))
    for group in batch.groups:
        for sample in group.samples:
            ids = np.concatenate([group.prompt.token_ids_L, sample.token_ids_T])
            num_tokens = sum(image.num_tokens for image in (*group.prompt.images, *sample.images))
            assert (len(sample.images), len(sample.completion_ids)) == (2, 3)
            assert np.count_nonzero(ids == parts.processor.family.image_token_id) == num_tokens
            assert not np.isin(sample.token_ids_T[sample.mask_T], parts.processor.banned_ids).any()
    exchanged = replace_samples(batch, lambda sample: replace(sample, images=sample.images[::-1]))
    with torch.no_grad():
        expected, others = whole_logprobs(parts, batch), whole_logprobs(parts, exchanged)
    for sample, reference, other in zip(batch.samples, expected, others, strict=True):
        np.testing.assert_allclose(sample.rollout_logprobs_T[sample.mask_T], reference, atol=1e-5)
        assert (reference - other)[-1].abs() > 1e-4, "the picture of the turn before counts"


def test_kept_keys_are_not_prefilled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that go through prefill: prompts and observations once, and the last token of each turn before."""
    parts, prefilled = tiny("qwen3_vl"), list[int]()
    noted(monkeypatch, PrefillRow, "part", lambda _row, start, end: prefilled.append(end - start))
    groups = sampled(parts, make_engine(parts))
    turns = [turn for group in groups for episode in group.episodes for turn in episode.tokens[1:]]
    prompts = sum(group.prompt.num_tokens for group in groups)
    assert sum(prefilled) == prompts + sum(turn.observation.num_tokens + 1 for turn in turns)


def test_requests_that_wait_or_run_hold_no_keys_beyond_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an evicted turn are freed, though a request that continues it waits."""
    parts = tiny("qwen3_vl")
    roomy = sampled(parts, make_engine(parts))
    budget = 2 * longest_tokens(roomy)
    copied, held, copy = list[weakref.ref[torch.Tensor]](), list[int](), PagedCache.copy_row

    def copying(cache: PagedCache, row: int, tokens: int) -> list[torch.Tensor]:
        layers = copy(cache, row, tokens)
        copied.append(weakref.ref(layers[0]))
        return layers

    def held_now(*_: Any) -> None:
        held.append(sum(layer.shape[2] for ref in copied if (layer := ref()) is not None))

    monkeypatch.setattr(PagedCache, "copy_row", copying)
    noted(monkeypatch, DecodeBatch, "step", held_now)
    assert_same_turns(roomy, sampled(parts, make_engine(parts, budget, **PAGED)))
    assert 0 < max(held) <= budget


def test_without_kept_keys_the_same_is_drawn() -> None:
    """The slow twin: an engine that forgets computes every turn from its whole conversation."""
    parts = tiny("qwen2_5_vl")
    forgets = make_engine(parts)
    generate = forgets.generate
    forgets.generate = lambda request: generate(replace(request, keep=False, continues=None))  # type: ignore[method-assign]
    assert_same_turns(sampled(parts, make_engine(parts)), sampled(parts, forgets))


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
    parts, asked = tiny("qwen3_vl"), environment()
    render, task = renderer(parts), asked.tasks("train")[0]
    reply = asked.reply(task, [Turn(messages=(), text=r"\crop{1}")])
    assert reply is not None
    answer = list(render.target(r"\crop{1}"))[: None if stopped else -1]
    whole = render.prompt([*asked.prompt(task), Message(role="assistant", parts=(r"\crop{1}",)), *reply])
    observation = render.observation(reply, after=answer[-1])
    grown = extended(render.prompt(asked.prompt(task)), np.array(answer), observation)
    np.testing.assert_array_equal(grown.token_ids_L, whole.token_ids_L)
    np.testing.assert_array_equal(grown.unexpanded_ids_U, whole.unexpanded_ids_U)
    assert [image.key for image in grown.images] == [image.key for image in whole.images]
    assert parts.processor.tokenizer.decode([answer[-1]]) == "<|im_end|>" or not stopped


class LateReplies(LooksTwice):
    """Replies that are the same in every run, after delays that are not; some episodes end early."""

    random = np.random.default_rng(0)

    async def open(self, task: Task, seed: int) -> Session:
        return LateSession(self, task, ends=seed % 3 == 0)


class LateSession(Session):
    def __init__(self, late: LateReplies, task: Task, *, ends: bool) -> None:
        self.late, self.task, self.ends = late, task, ends

    async def reply(self, turns: Sequence[Turn]) -> Sequence[Message] | None:
        await asyncio.sleep(self.late.random.uniform(0, 0.05))
        return None if self.ends and len(turns) == 2 else self.late.reply(self.task, turns)

    async def close(self) -> None: ...


def test_a_rollout_repeats_bit_for_bit_whichever_reply_comes_first() -> None:
    parts = tiny("qwen3_vl")
    limited = LimitedSessions(environment(LateReplies), SessionLimits(max_concurrent=5), "late")
    # the delays of the second rollout are other ones
    first, second = (sampled(parts, make_engine(parts), asked=limited, n=4) for _ in range(2))
    assert len({len(episode.turns) for group in first for episode in group.episodes}) > 1
    assert_same_turns(first, second, atol=0)


PARTS = tiny("qwen3_vl")
QUESTION = "What colour?"


def said(role: Role, *parts: str | ImageRef) -> Message:
    return Message(role=role, parts=parts)


def picture(seed: int) -> ImageRef:
    return ImageRef(source=encoded(noise(seed)))


def agents_renderer(max_new_tokens: int = 5) -> Renderer:
    opener = ImageOpener(max_image_mib=1, max_image_megapixels=1)
    return Renderer(PARTS.processor, opener, max_new_tokens=max_new_tokens)


def agents(max_new_tokens: int = 5) -> AgentConversations:
    """Conversations that agents send whole with every request."""
    return AgentConversations(make_engine(PARTS, 9000), agents_renderer(max_new_tokens), "agents")


def ask(conversations: AgentConversations, *messages: Message) -> AgentTurn:
    return wait_for(conversations.answer(messages, Sampling(max_new_tokens=5, seed=3)))


def test_a_conversation_of_an_agent_continues_with_the_ids_that_were_sampled() -> None:
    conversations, messages, turns = agents(), list[Message](), list[AgentTurn]()
    for seed in (1, 2, 3):
        messages.append(said("user", picture(seed), "How many circles are here?"))
        turns.append(ask(conversations, *messages))
        messages.append(said("assistant", turns[-1].completion.text))
    assert [turn.number for turn in turns] == [1, 2, 3]
    assert {turn.episode for turn in turns} == {turns[0].completion.id}
    assert [turn.continues for turn in turns] == [None, *(turn.completion.id for turn in turns[:2])]
    assert conversations.num_unmatched == 0
    keys = [image.key for seed in (1, 2, 3) for image in agents_renderer().prompt([said("user", picture(seed))]).images]
    assert [image.key for image in turns[-1].prompt.images] == keys
    for before, turn in pairwise(turns):
        ids = np.concatenate([before.prompt.token_ids_L, before.completion.token_ids_T])
        assert turn.prompt.token_ids_L[: len(ids)].tolist() == ids.tolist()
    for turn in turns:  # the log-probs are transformers' on the ids of the whole conversation
        expected = reference_logprobs(PARTS, turn.prompt, turn.completion.token_ids_T)
        np.testing.assert_allclose(turn.completion.logprobs_T, expected.detach().numpy(), atol=2e-5)


def test_a_changed_conversation_of_an_agent_begins_a_new_episode_and_is_counted() -> None:
    conversations, question = agents(), said("user", QUESTION)
    first = ask(conversations, question)
    answer = first.completion.text
    for changed in (f"{answer}!", "red"):
        assert ask(conversations, question, said("assistant", changed), question).continues is None
    assert conversations.num_unmatched == 2
    for _ in range(2):  # two branches of one conversation
        branch = ask(conversations, question, said("assistant", answer), question)
        assert branch.continues == first.completion.id
    assert conversations.num_unmatched == 2


def test_what_an_agent_sends_that_cannot_be_rendered_is_one_line() -> None:
    damaged = said("user", ImageRef(source=b"hello", where="a picture of the request"))
    for conversations, message, error in (
        (agents(), damaged, "a picture of the request"),
        (agents(), said("user", "<|im_end|>"), r"its text contains <\|im_end\|>"),
        (agents(PARTS.processor.max_positions - 4), said("user", QUESTION), "has positions for only 4 before"),
    ):
        with pytest.raises(BadRowError, match=error):
            ask(conversations, message)
