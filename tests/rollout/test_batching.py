"""However rows are batched, refilled, cached, preempted and prefilled: the same completions, and the work counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fovea.errors import EngineError
from fovea.models.activation_tape import Tape
from fovea.models.decoder import decoder_shape
from fovea.models.tiny import TinyParts
from fovea.rollout.base import CountsPrefill
from fovea.rollout.collect import extended
from fovea.rollout.embedded import paged_cache, prefill, scheduler
from fovea.rollout.embedded.batch import DecodeBatch
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.rollout.embedded.prefill import prompt_passes
from fovea.rollout.embedded.requests import KeptKeys, RemovedRow
from fovea.types import Completion, Prompt, Request, Sampling
from fovea_gym.types import ImageRef
from fovea_gym.utils.event_loop import wait_for
from gym_tests.tables import table
from tests.reference import reference_logprobs
from tests.rollout.drawing import (
    generate,
    keep_turns_of,
    make_engine,
    mixed_requests,
    noted,
    noted_rows,
    noted_turns,
    plain_engine,
    same,
    seeded,
    together,
)
from tests.rollout.two_turns import assert_same_turns, longest_tokens, sampled
from tests.tiny_models import image, mixed_prompts, renderer, tiny, user

PARTS, DELTA_NETS = tiny("qwen3_vl"), tiny("qwen3_5", num_layers=4)
COUNTS = [2, 5, 1, 4, 3, 4, 2, 1, 6]
TIGHT = 330
"""Two or three of the requests below at a time."""
PAGED: dict[str, Any] = {"cache": "paged", "page_tokens": 4}


def alone(parts: TinyParts, counts: Sequence[int]) -> list[Sequence[Completion]]:
    """Each request in a separate engine, on the plainest way."""
    requests = zip(*mixed_requests(parts, len(counts)), counts, strict=True)
    return [generate(make_engine(parts), [p], [s], n)[0] for p, s, n in requests]


@pytest.fixture(scope="module")
def each_alone() -> list[Sequence[Completion]]:
    return alone(PARTS, COUNTS)


WAYS = [
    (budget, decode_steps_per_wait, pass_tokens, cache)
    for number, cache in enumerate(("dense", "paged"))
    for budget, decode_steps_per_wait, pass_tokens in product((TIGHT, 10_000), (1, 7), (11, 16_384))
    if (number + (budget == TIGHT) + (decode_steps_per_wait == 1) + (pass_tokens == 11)) % 2
]
"""Half of all combinations, in which those of any three settings are all present."""


@pytest.mark.parametrize(("budget", "decode_steps_per_wait", "pass_tokens", "cache"), WAYS)
def test_no_way_of_running_changes_a_completion(
    each_alone: list[Sequence[Completion]], budget: int, decode_steps_per_wait: int, pass_tokens: int, cache: str
) -> None:
    tuning = {"decode_steps_per_wait": decode_steps_per_wait, "pass_tokens": pass_tokens, "cache": cache}
    engine = make_engine(PARTS, budget + 16 * sum(COUNTS) * (cache == "paged"), page_tokens=16, **tuning)
    for _ in range(2):  # a second time on what the first has left behind
        together = generate(engine, *mixed_requests(PARTS), COUNTS)
        assert all(same(a, b) for a, b in zip(each_alone, together, strict=True))


@pytest.fixture
def rows_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return noted_rows(monkeypatch)


def test_no_way_of_running_delta_nets_changes_a_completion(rows_run: list[int]) -> None:
    """Requests that wait, chunks of prompts, rows that move, and more steps between syncs than states allow."""
    counts = COUNTS[:6]
    prompts, samplings = mixed_requests(DELTA_NETS, len(counts))
    expected = alone(DELTA_NETS, counts)
    states = decoder_shape(DELTA_NETS.network.config.text_config).state_tokens(4)
    requests = zip(prompts, samplings, counts, strict=True)
    longest = max(p.num_tokens + n * (s.max_new_tokens + states) for p, s, n in requests)
    for budget, pass_tokens in ((longest + 100, 11), (200_000, 16_384)):
        rows_run.clear()
        engine = make_engine(DELTA_NETS, budget, pass_tokens=pass_tokens, decode_steps_per_wait=7)
        together = generate(engine, prompts, samplings, counts)
        assert all(same(a, b) for a, b in zip(expected, together, strict=True))
        joined_while_others_ran = any(before < after for before, after in pairwise(rows_run))
        assert joined_while_others_ran == (budget < 200_000)


def test_turns_are_kept_by_the_memory_of_keys_and_states_of_delta_nets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of fewer tokens than a turn takes keeps none, and the same is sampled."""
    token_bytes = decoder_shape(DELTA_NETS.network.config.text_config).token_bytes(4)
    kept = noted_turns(monkeypatch)
    groups = sampled(DELTA_NETS, make_engine(DELTA_NETS))
    assert kept
    for each, _ in kept:
        states = [x for state in each.states for x in (state.tail_RKC, state.memory_RVDF)]
        held = sum(x.nbytes for x in (*each.layers, *states))
        assert held <= each.cost_tokens * token_bytes < held + token_bytes
    keep_turns_of(min(each.cost_tokens for each, _ in kept) - 1, monkeypatch)
    kept.clear()
    assert_same_turns(groups, sampled(DELTA_NETS, make_engine(DELTA_NETS)))
    assert not any(number for _, number in kept)


def test_only_completions_that_run_are_decoded(rows_run: list[int]) -> None:
    groups = generate(make_engine(PARTS), *mixed_requests(PARTS), COUNTS)
    lengths = [len(completion.token_ids_T) for group in groups for completion in group]
    assert rows_run == [sum(length > step for length in lengths) for step in range(1, max(lengths))]


def test_a_request_moves_up_as_soon_as_there_is_room(rows_run: list[int]) -> None:
    """Of two requests that do not fit together, the second joins while the first's longest completion runs."""
    prompt = mixed_prompts(PARTS)[2]
    samplings = [Sampling(max_new_tokens=100, seed=seed, stop=("e",)) for seed in (1, 3)]
    groups = generate(make_engine(PARTS, 8 * 100 + 2 * prompt.num_tokens), [prompt] * 2, samplings, [8, 4])
    lengths = [sorted(len(c.token_ids_T) for c in group) for group in groups]
    starts = next(step for step in range(1, 101) if sum(length > step for length in lengths[0]) <= 4)
    assert starts < lengths[0][-1], "the first request has completions of different length"
    assert len(rows_run) == max(lengths[0][-1] - 1, starts + lengths[1][-1] - 2)


def test_the_budget_bounds_what_runs(rows_run: list[int]) -> None:
    prompt = mixed_prompts(PARTS)[2]
    engine = make_engine(PARTS, 2 * (prompt.num_tokens + 3 * 10))
    generate(engine, [prompt] * 5, seeded(5, max_new_tokens=10), 3)
    assert max(rows_run) == 6


def test_weights_that_are_not_finite_are_an_error() -> None:
    parts = tiny("qwen3_vl")
    with torch.no_grad():
        next(parts.network.get_submodule("model.language_model.norm").parameters()).fill_(torch.nan)
    with pytest.raises(EngineError, match="not finite"):
        generate(make_engine(parts), mixed_prompts(parts)[:1], [Sampling(max_new_tokens=3)], 2)


PREEMPTED_COUNTS = [3, 5, 2, 4, 6]


def unequal_requests() -> tuple[list[Prompt], list[Sampling]]:
    """Completions of unequal lengths, by stop tokens, stop strings and limits."""
    samplings = [
        Sampling(max_new_tokens=30, seed=1, temperature=2.0),
        Sampling(max_new_tokens=40, seed=2, temperature=0.5, top_k=9),
        Sampling(max_new_tokens=43, seed=3, top_p=0.8, min_p=0.01, stop=("e", "un")),
        Sampling(max_new_tokens=37, seed=5, temperature=0),
        Sampling(max_new_tokens=40, seed=6, temperature=3.0, stop=("t",)),
    ]
    return (mixed_prompts(PARTS) * 2)[:5], samplings


def largest_tokens() -> int:
    """Cache tokens of the largest of these requests at its worst case, in whole pages."""
    return max(
        p.num_tokens // 4 * 4 + n * (p.num_tokens % 4 + s.max_new_tokens + 3)
        for p, s, n in zip(*unequal_requests(), PREEMPTED_COUNTS, strict=True)
    )


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[RemovedRow]:
    """The rows that were preempted; admission leaves rows no room to grow, so that many are."""
    seen: list[RemovedRow] = []
    monkeypatch.setattr(paged_cache, "GROWTH_TOKENS", 1)
    noted(monkeypatch, scheduler, "resumption", seen.append)
    return seen


@pytest.mark.parametrize("decode_steps_per_wait", [1, 7])
def test_preempted_completions_are_those_of_an_engine_with_room(
    preempted: list[RemovedRow], decode_steps_per_wait: int
) -> None:
    roomy = generate(make_engine(PARTS, **PAGED), *unequal_requests(), PREEMPTED_COUNTS)
    assert not preempted
    engine = make_engine(PARTS, largest_tokens(), decode_steps_per_wait=decode_steps_per_wait, **PAGED)
    for _ in range(2):  # a second time on what the first has left behind
        tight = generate(engine, *unequal_requests(), PREEMPTED_COUNTS)
        assert all(same(a, b) for a, b in zip(roomy, tight, strict=True))
        assert len({row.row.completion_id for row in preempted}) > len(PREEMPTED_COUNTS)
        drawn_once = {c.id: c for group in tight for c in group}
        for row in preempted:  # what had been sampled stays, bit for bit
            completion, length = drawn_once[row.row.completion_id], len(row.token_ids_T)
            np.testing.assert_array_equal(completion.token_ids_T[:length], row.token_ids_T)
            np.testing.assert_array_equal(completion.logprobs_T[:length], row.logprobs_T)
        preempted.clear()


def test_the_youngest_is_preempted(preempted: list[RemovedRow], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine always has a row that is older, the oldest request never waits."""
    prompts, before, remove = mixed_prompts(PARTS)[2:] * 4, list[tuple[str, int]](), DecodeBatch.remove

    def removing(self: DecodeBatch, indices: Sequence[int]) -> list[RemovedRow]:
        youngest = max((row.request.request.id, row.index) for row in self.rows)
        removed = remove(self, indices)
        if any(not row.stopped and len(row.token_ids_T) < 40 for row in removed):
            before.append(youngest)
        return removed

    monkeypatch.setattr(DecodeBatch, "remove", removing)
    engine = make_engine(PARTS, prompts[0].num_tokens + 3 * 40 + 16, **PAGED)
    generate(engine, prompts, seeded(4, max_new_tokens=40), 3)
    assert len(preempted) > 3
    assert [(row.row.request.request.id, row.row.index) for row in preempted] == before


@pytest.mark.parametrize("evicted", [True, False])
def test_later_turns_are_preempted_and_find_their_kept_keys_again(
    preempted: list[RemovedRow], monkeypatch: pytest.MonkeyPatch, evicted: bool
) -> None:
    restored: list[KeptKeys] = []
    noted(monkeypatch, prefill, "restore", lambda _cache, kept: restored.extend(keys for _, keys in kept))
    roomy = sampled(PARTS, make_engine(PARTS, **PAGED))
    if not evicted:
        keep_turns_of(10**6, monkeypatch)
    tight = sampled(PARTS, make_engine(PARTS, 2 * longest_tokens(roomy), **PAGED))
    assert any(row.row.request.request.continues is not None for row in preempted)
    twice = len(restored) - len({id(kept) for kept in restored})
    assert (twice == 0) == evicted, "before a preemption and after it"
    assert_same_turns(roomy, tight)


def test_a_preempted_completion_keeps_the_vision_graph_of_its_prompt(preempted: list[RemovedRow]) -> None:
    """On a GPU the tape holds vision graphs alone, since linear outputs need every token to pass once, in order."""
    (prompts, samplings), tape = unequal_requests(), Tape([], 2**30, torch.float32)
    engine = make_engine(PARTS, largest_tokens(), tape=tape, **PAGED)
    groups = generate(engine, prompts, samplings, PREEMPTED_COUNTS, for_update=True)
    assert preempted
    for prompt, group in zip(prompts, groups, strict=True):
        traces = [tape.trace(completion.id) for completion in group]
        assert all(trace is not None for trace in traces)
        (graph,) = {trace.graph_number for trace in traces if trace is not None}
        assert tape.graph(graph).keys() >= {image.key for image in prompt.images}


def test_a_failure_of_a_preempted_completion_reaches_every_caller(
    preempted: list[RemovedRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the caller whose request is admitted with it, in neither the queue nor the batch at that time."""
    prompt = mixed_prompts(PARTS)[0]
    # two of the prompts fit, and not all of their completions; the third waits for the end of the first
    engine = make_engine(PARTS, prompt.num_tokens * 2 + 24, **PAGED)

    def fail(*_: object) -> None:
        raise EngineError("no memory")

    monkeypatch.setattr(DecodeBatch, "resume", fail)

    async def ends() -> list[BaseException | Sequence[Completion]]:
        samplings = seeded(3, max_new_tokens=20)
        # for an update, so that equal prompts share no pages
        asked = [Request(id=str(i), prompt=prompt, sampling=s, for_update=True) for i, s in enumerate(samplings)]
        async with asyncio.timeout(20):
            return await asyncio.gather(*map(engine.generate, asked), return_exceptions=True)

    first, *others = wait_for(ends())
    assert not isinstance(first, BaseException)
    assert len(preempted) == 1
    assert [str(each) for each in others] == ["no memory"] * 2


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
