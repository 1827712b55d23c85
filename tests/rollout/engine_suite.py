"""What every engine must do, against transformers: one suite, run by each engine's own test module.

A module derives a class of `EngineSuite` and defines the fixture `served`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from fovea.errors import EngineError
from fovea.models.render import Renderer
from fovea.models.tiny import TinyParts
from fovea.rollout.base import Engine
from fovea.rollout.collect import extended
from fovea.types import Completion, Prompt, Request, Sampling
from fovea_gym.environments.answer_end import find_answer_end
from fovea_gym.types import AnswerEnd, ImageRef
from fovea_gym.utils.event_loop import wait_for
from gym_tests.images import from_array
from tests.records import text_prompt
from tests.reference import reference_logprobs
from tests.rollout.drawing import same, together
from tests.tiny_models import image, renderer, user

TOLERANCE = 2e-5
"""Of log-probs in float32: two orders of summation."""
equal = partial(same, atol=TOLERANCE)
LIMIT_TOKENS = 1000
"""Longest prompt with its completion that an engine is made for here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """An engine, the model that it serves, and a weight sync of that model's present weights."""

    parts: TinyParts
    engine: Engine
    sync: Callable[[int], None]

    def generate(self, *requests: Request) -> list[Sequence[Completion]]:
        return together(self.engine, requests)

    def largest_difference(self, request: Request, completions: Sequence[Completion]) -> float:
        """Largest difference between the engine's log-probs and those of transformers."""
        temperature = request.sampling.temperature or 1.0
        with torch.no_grad():
            expected = [reference_logprobs(self.parts, request.prompt, c.token_ids_T, temperature) for c in completions]
        found = torch.from_numpy(np.concatenate([c.logprobs_T for c in completions]))
        return float((found - torch.cat(expected)).abs().max())


def ask(name: str, prompt: Prompt, n: int = 1, **sampling: object) -> Request:
    settings = {"max_new_tokens": 16, "seed": 5} | sampling
    return Request(id=name, prompt=prompt, sampling=Sampling(**settings), n=n)  # type: ignore[arg-type]


def slow(name: str, prompt: Prompt) -> Request:
    """A request that still runs when the next call of a busy machine arrives."""
    return ask(name, prompt, n=4, max_new_tokens=200)


async def begun(engine: Engine, request: Request) -> asyncio.Task[Sequence[Completion]]:
    """A request that the engine has begun."""
    drawing = asyncio.ensure_future(engine.generate(request))
    for _ in range(3):
        await asyncio.sleep(0)
    return drawing


def prompts_of(parts: TinyParts) -> list[Prompt]:
    """None, one and three images, of several sizes and places."""
    render = renderer(parts)
    return [
        render.prompt(user("What colour is the square?")),
        render.prompt(user(image(1), "How many circles?")),
        render.prompt(user("Compare ", image(2), " with ", image(3, 64, 96), " and ", image(4, 32, 48), "!")),
    ]


def check_samples_of_two_syncs(served: Served) -> None:
    """That it draws with the weights of a weight sync, and after a weight sync of changed ones with those."""
    for version in (1, 2):
        served.sync(version)
        check_draws(served, version)
        with torch.no_grad():
            for parameter in served.parts.network.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)


def check_draws(served: Served, version: int) -> None:
    """That completions of unequal prompts, sampled at once, have the log-probs of the weights of this sync."""
    requests = [ask(f"{version}/{index}", prompt, n=2) for index, prompt in enumerate(prompts_of(served.parts))]
    for completions in check(served, *requests):
        assert {completion.version for completion in completions} == {version}


def check(served: Served, *requests: Request) -> list[Sequence[Completion]]:
    """Completions of all requests, which have transformers' log-probs."""
    groups = served.generate(*requests)
    for request, completions in zip(requests, groups, strict=True):
        assert served.largest_difference(request, completions) < TOLERANCE
    return groups


class EngineSuite:
    @pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
    def test_logprobs_equal_transformers_in_a_mixed_batch(self, served: Served, temperature: float) -> None:
        requests = [
            ask(f"mixed/{temperature}/{index}", prompt, n=4, temperature=temperature)
            for index, prompt in enumerate(prompts_of(served.parts))
        ]
        for request, completions in zip(requests, check(served, *requests), strict=True):
            assert [c.id for c in completions] == [f"{request.id}/{number}" for number in range(4)]
            sampled = {tuple(c.token_ids_T.tolist()) for c in completions}
            assert len(sampled) == (4 if temperature else 1)

    def test_a_second_turn_with_an_image_goes_on_from_the_first(self, served: Served) -> None:
        first = ask("turns", prompts_of(served.parts)[1], n=2)
        answers = served.generate(first)[0]
        render, later = renderer(served.parts), []
        for answer in answers:
            observation = render.observation(user("And here? ", image(9, 64, 48)), after=int(answer.token_ids_T[-1]))
            prompt = extended(first.prompt, answer.token_ids_T, observation)
            assert len(prompt.images) == 2
            request = ask(f"{answer.id}/turn2", prompt)
            later.append(Request(id=request.id, prompt=prompt, sampling=request.sampling, continues=answer.id))
        check(served, *later)

    def test_200_pictures_that_differ_in_one_pixel_are_200(self, served: Served) -> None:
        """One question, whose pictures no cache may take for each other."""
        render, base = renderer(served.parts), np.asarray(image(1).source)
        requests = []
        for place in range(200):
            pixels = base.copy()
            pixels[divmod(11 * place, 48)] ^= 255
            prompt = render.prompt(user(ImageRef(source=pixels), "How many circles?"))
            requests.append(ask(f"pixel/{place}", prompt, temperature=1.0, max_new_tokens=2))
        assert len({each.prompt.images[0].key for each in requests}) == 200
        answers = check(served, *requests)
        exchanged = zip(requests, [*answers[1:], answers[0]], strict=True)
        gaps = [served.largest_difference(request, completions) for request, completions in exchanged]
        assert min(gaps) > TOLERANCE, "another picture gives other log-probs"

    def test_a_stop_token_ends_a_completion_and_is_part_of_it(self, served: Served) -> None:
        request = ask("stop token", prompts_of(served.parts)[1], n=4, temperature=2.0, max_new_tokens=200)
        completions = served.generate(request)[0]
        ends = [c.token_ids_T[-1] in served.parts.processor.stop_ids for c in completions]
        assert any(ends), "200 tokens of near-uniform sampling meet the stop token"
        for completion, ended in zip(completions, ends, strict=True):
            assert completion.finish == ("stop" if ended else "length")
            assert not np.isin(completion.token_ids_T[:-1], served.parts.processor.stop_ids).any()
            assert "<|im_end|>" not in completion.text

    @pytest.mark.parametrize("comes_after", [False, True])
    def test_a_completion_ends_with_the_token_that_closes_its_answer(self, served: Served, comes_after: bool) -> None:
        prompt = prompts_of(served.parts)[0]
        free = served.generate(ask(f"open {comes_after}", prompt, n=4, max_new_tokens=60))[0]
        text, decode = free[0].text, served.parts.processor.tokenizer.decode
        end = AnswerEnd(closing=text[10:12], after=text[3:5] if comes_after else "")
        closed = served.generate(ask(f"closed {comes_after}", prompt, n=4, max_new_tokens=60, answer_end=end))[0]
        assert len(closed[0].token_ids_T) < len(free[0].token_ids_T)
        for whole, short in zip(free, closed, strict=True):
            ids = whole.token_ids_T.tolist()
            lengths = (n for n in range(1, len(ids) + 1) if find_answer_end(decode(ids[:n]), end) is not None)
            if (length := next(lengths, None)) is None:
                assert equal([short], [whole])
                continue
            assert (short.token_ids_T.tolist(), short.finish) == (ids[:length], "stop")
            assert np.allclose(short.logprobs_T, whole.logprobs_T[:length], atol=TOLERANCE)
            assert short.text == decode(ids[:length])

    def test_a_stop_string_ends_a_completion_and_is_cut_from_its_text(self, served: Served) -> None:
        prompt = prompts_of(served.parts)[0]
        free = served.generate(ask("free", prompt, n=4, max_new_tokens=60))[0]
        stop = free[0].text[10:12]
        cut = served.generate(ask("cut", prompt, n=4, max_new_tokens=60, stop=(stop, "never")))[0]
        for whole, short in zip(free, cut, strict=True):
            assert short.text == whole.text.split(stop)[0]
            assert short.token_ids_T.tolist() == whole.token_ids_T[: len(short.token_ids_T)].tolist()
            assert short.finish == ("stop" if stop in whole.text else whole.finish)
        assert cut[0].finish == "stop"
        assert len(cut[0].token_ids_T) < len(free[0].token_ids_T)

    def test_length_ends_a_completion(self, served: Served) -> None:
        completion = served.generate(ask("short", prompts_of(served.parts)[1], max_new_tokens=1))[0][0]
        assert (len(completion.token_ids_T), completion.finish) == (1, "length")

    def test_a_seed_decides_what_is_drawn(self, served: Served) -> None:
        prompt = prompts_of(served.parts)[2]
        requests = [ask(f"seed/{i}", prompt, n=3, seed=seed) for i, seed in enumerate((2**64 - 1, 2**64 - 1, 7))]
        first, again, other = served.generate(*requests)
        assert equal(first, again)
        assert not equal(first, other)

    def test_nothing_banned_is_drawn(self, served: Served) -> None:
        requests = [
            ask(f"bans/{index}", prompt, n=2, temperature=2.0, max_new_tokens=200)
            for index, prompt in enumerate(prompts_of(served.parts))
        ]
        groups = served.generate(*requests)
        sampled = np.concatenate([c.token_ids_T for group in groups for c in group])
        assert len(set(sampled.tolist())) > 100, "near-uniform sampling visits most of the vocabulary"
        processor = served.parts.processor
        assert processor.tokenizer.convert_tokens_to_ids("<|image_pad|>") in processor.banned_ids
        assert not np.isin(sampled, processor.banned_ids).any()

    def test_a_prompt_at_the_limit_is_served_and_one_beyond_it_refused(self, served: Served) -> None:
        words = renderer(served.parts).prompt(user("How many circles are there? " * 1000)).token_ids_L

        def of_length(num_tokens: int) -> Prompt:
            ids = np.concatenate([words[:-20][: num_tokens - 20], words[-20:]])
            assert len(ids) == num_tokens
            return text_prompt(ids)

        check(served, ask("longest", of_length(LIMIT_TOKENS - 8), max_new_tokens=8))
        with pytest.raises(EngineError, match=r"needs 1001|needs 1008"):
            served.generate(ask("longer", of_length(LIMIT_TOKENS - 7), max_new_tokens=8))

    def test_an_image_beyond_the_pixel_limit_is_what_the_trainer_sees(self, served: Served) -> None:
        render = Renderer(served.parts.processor, from_array, max_pixels=64 * 64)
        prompt = render.prompt(user(image(5, 200, 240), "How many circles?"))
        assert prompt.images[0].num_tokens <= 16
        check(served, ask("large image", prompt, n=2))

    def test_of_200_requests_at_once_none_is_lost_or_doubled(self, served: Served) -> None:
        prompts = prompts_of(served.parts)
        requests = [ask(f"many/{i}", prompts[i % 3], max_new_tokens=4 + i % 5, seed=i) for i in range(200)]
        groups = served.generate(*requests)
        assert [group[0].id for group in groups] == [f"many/{i}/0" for i in range(200)]
        assert all(len(group) == 1 for group in groups)
        for i in range(0, 200, 17):
            assert served.largest_difference(requests[i], groups[i]) < TOLERANCE

    def test_new_weights_are_sampled_with_and_nothing_is_stale(self, served: Served) -> None:
        requests = [ask(f"sync/{i}", prompt, n=2) for i, prompt in enumerate(prompts_of(served.parts))]
        before = served.generate(*requests)
        for version in (11, 12):
            with torch.no_grad():
                for seed, parameter in enumerate(served.parts.network.parameters()):
                    noise = torch.Generator().manual_seed(1000 * version + seed)
                    parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.02)
            wait_for(served.engine.sleep())
            served.sync(version)
            wait_for(served.engine.wake())
            groups = check(served, *requests)
            for group, old in zip(groups, before, strict=True):
                assert {c.version for c in group} == {version}
                assert not np.allclose(group[0].logprobs_T[0], old[0].logprobs_T[0], atol=1e-3)
            before = groups

    def test_an_engine_that_sleeps_takes_no_request_and_one_that_draws_cannot_sleep(self, served: Served) -> None:
        request = slow("asleep", prompts_of(served.parts)[1])

        async def nap() -> None:
            drawing = await begun(served.engine, request)
            with pytest.raises(EngineError, match="sleep"):
                await served.engine.sleep()
            await drawing
            await served.engine.sleep()
            with pytest.raises(EngineError, match="asleep"):
                await served.engine.generate(request)

        wait_for(nap())
        served.sync(20)
        wait_for(served.engine.wake())
        assert served.generate(request)[0][0].version == 20

    def test_a_request_whose_caller_gives_up_leaves_the_others_alone(self, served: Served) -> None:
        kept = ask("kept", prompts_of(served.parts)[0], n=2)
        given_up = ask("given up", prompts_of(served.parts)[1], n=2, max_new_tokens=200)

        async def both() -> Sequence[Completion]:
            tasks = [asyncio.ensure_future(served.engine.generate(each)) for each in (given_up, kept)]
            for _ in range(3):
                await asyncio.sleep(0)
            tasks[0].cancel()
            return await tasks[1]

        assert equal(wait_for(both()), served.generate(kept)[0])


class ServingSuite(EngineSuite):
    """What engines of other packages have settings for besides."""

    def test_no_completion_ends_before_min_new_tokens(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        prompt = prompts_of(served.parts)[1]
        # two, because an engine may be made for 16 completions at once
        requests = [
            ask(f"minimum/{seed}", prompt, n=16, seed=seed, temperature=2.0, max_new_tokens=150) for seed in (5, 21)
        ]

        def sampled() -> list[Completion]:
            return [completion for group in served.generate(*requests) for completion in group]

        assert min(len(completion.token_ids_T) for completion in sampled()) < 60
        engine: Any = served.engine
        monkeypatch.setattr(engine, "translator", replace(engine.translator, min_new_tokens=60))
        completions = sampled()
        assert min(len(completion.token_ids_T) for completion in completions) >= 60
        for completion in completions:
            assert not np.isin(completion.token_ids_T[:59], served.parts.processor.stop_ids).any()
        assert any(completion.finish == "stop" for completion in completions), "stop tokens are sampled afterwards"
