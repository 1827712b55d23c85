"""Draws against transformers' warpers and the distribution; completions that end where their answer ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fovea.config.run import Config
from fovea.config.sections import Warmup
from fovea.models.tiny import TinyParts
from fovea.models.vlm import VLM
from fovea.rollout.embedded.sampler import (
    Draw,
    inverse_cdf,
    inverse_cdf_plain,
    kept_tokens,
    needs_of,
    row_settings,
    sample_tokens,
    uniforms,
)
from fovea.run.sampling import rollout_sampling
from fovea.train.base import SftExample
from fovea.train.torch.policy import supervised_trainer
from fovea.types import Completion, Sampling
from fovea.wiring.environment import make_environment
from fovea_gym.environments.answer_end import find_answer_end
from fovea_gym.errors import ConfigError
from fovea_gym.types import AnswerEnd
from gym_tests.bandit import BanditEnvironment
from gym_tests.tables import table
from tests.records import completion_of
from tests.rollout.drawing import generate, make_engine, plain_engine, same
from tests.tiny_models import mixed_prompts, renderer, tiny

CPU = torch.device("cpu")
LAST = float(np.nextafter(1.0, 0.0))
EDGE = 1e-6
"""Sums of float32 probabilities are off by their rounding: so near to an edge of an interval either side is right."""


def draw_rows(
    logits: torch.Tensor, uniform: torch.Tensor, samplings: list[Sampling], banned: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    banned_K, needs = torch.tensor(banned, dtype=torch.long), needs_of(samplings)
    draw = Draw(uniform_B=uniform, settings=row_settings(samplings, CPU), needs=needs, banned_K=banned_K)
    return sample_tokens(logits.clone(), draw)


def random_logits(rows: int = 64, vocabulary: int = 50) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 3


@table(
    "settings",
    [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}, {"top_p": 1e-6}],
)
def test_kept_tokens_equal_transformers_warpers(settings: dict[str, float]) -> None:
    logits, warper = random_logits(), {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    warpers = LogitsProcessorList(warper[name](value) for name, value in settings.items())
    expected = torch.isfinite(warpers(None, logits))
    rows = row_settings([Sampling(max_new_tokens=1, **settings)] * len(logits), logits.device)  # type: ignore[arg-type]
    torch.testing.assert_close(kept_tokens(logits.log_softmax(-1), rows), expected)


@table("settings", [{"top_p": 1e-300}, {"temperature": 1e-300}, {"temperature": 1e-40}, {"min_p": 1.0}])
def test_settings_however_small_leave_the_likeliest_token(settings: dict[str, float]) -> None:
    logits = random_logits()
    likeliest = logits.index_fill(1, torch.tensor([2]), -torch.inf).argmax(-1)
    sampling = Sampling(max_new_tokens=1, **settings)  # type: ignore[arg-type]
    for uniform in (0.0, 0.5, LAST):
        u = torch.full((len(logits),), uniform, dtype=torch.float64)
        tokens, logprobs = draw_rows(logits, u, [sampling] * len(logits), (2,))
        assert tokens.tolist() == likeliest.tolist()
        assert torch.isfinite(logprobs).all()


def test_frequencies_are_the_probabilities() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, -torch.inf]])
    n = 40_000
    u = torch.from_numpy(uniforms(3, 1, n)[0])
    tokens, logprobs = draw_rows(logits.expand(n, -1), u, [Sampling(max_new_tokens=1, temperature=0.7)] * n, (2,))
    counts = torch.bincount(tokens, minlength=5) / n
    allowed = (logits[0] / 0.7).index_fill(0, torch.tensor([2]), -torch.inf).softmax(-1)
    torch.testing.assert_close(counts, allowed, atol=0.01, rtol=0)
    assert counts[2] == counts[4] == 0
    torch.testing.assert_close(logprobs, allowed.log()[tokens])


def test_the_ends_of_the_unit_interval_draw_tokens_that_have_probability() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 5.0, -torch.inf]]).repeat(2, 1)
    u = torch.tensor([0.0, LAST], dtype=torch.float64)
    assert draw_rows(logits, u, [Sampling(max_new_tokens=1)] * 2)[0].tolist() == [1, 2]


def test_uniforms_depend_on_seed_and_place_alone() -> None:
    np.testing.assert_array_equal(uniforms(5, 8, 16)[:3], uniforms(5, 3, 16))
    assert not np.array_equal(uniforms(5, 1, 16), uniforms(6, 1, 16))


@table("vocabulary", [1, 2, 7, 50, 257, 4096, 32_768])
def test_every_number_draws_the_token_whose_interval_holds_it(vocabulary: int) -> None:
    """Numbers of a grid, and the middle of every interval that is wide enough."""
    probs = random_logits(1, vocabulary)[0].softmax(-1)
    ends = probs.double().cumsum(0) / probs.double().sum()
    grid = torch.linspace(0, 1, min(4001, 8_000_000 // vocabulary), dtype=torch.float64)[:-1]
    assert ((grid[:, None] - ends[None]).abs().amin(1) < EDGE).sum() < 0.2 * len(grid)
    numbers = torch.cat([grid, (ends - 0.5 * probs.double())[probs > 10 * EDGE]])
    clear = numbers[(numbers[:, None] - ends[None]).abs().amin(1) >= EDGE]
    expected = torch.searchsorted(ends, clear, right=True).clamp(max=vocabulary - 1)
    rows = probs.expand(len(clear), -1)
    assert torch.equal(inverse_cdf(rows, clear), expected)
    assert torch.equal(inverse_cdf_plain(rows, clear), expected)


def test_no_token_of_probability_zero_is_drawn_whatever_block_it_is_in() -> None:
    probs = torch.zeros(1, 1000)
    probs[0, [37, 38, 700, 981]] = torch.tensor([1e-30, 0.5, 1e-12, 0.5])
    u = torch.cat([torch.linspace(0, 1, 999, dtype=torch.float64)[:-1], torch.tensor([LAST], dtype=torch.float64)])
    sampled = inverse_cdf(probs.expand(len(u), -1), u)
    assert set(sampled.tolist()) <= {37, 38, 700, 981}
    assert (sampled[0], sampled[-1]) == (37, 981)


def test_many_draws_pass_a_chi_square_test() -> None:
    probs, n = random_logits(1, 300)[0].softmax(-1).double(), 200_000
    sampled = inverse_cdf(probs.float().expand(n, -1), torch.from_numpy(uniforms(11, 1, n)[0]))
    counts = torch.bincount(sampled, minlength=300).double()
    often = probs * n > 5
    expected = torch.cat([probs[often] * n, (probs[~often] * n).sum()[None]])
    seen = torch.cat([counts[often], counts[~often].sum()[None]])
    freedom = len(expected) - 1
    # Wilson and Hilferty: the cube root of a chi-square is nearly normal; 4 standard deviations
    bound = freedom * (1 - 2 / (9 * freedom) + 4 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert ((seen - expected) ** 2 / expected).sum() < bound


def test_rows_of_every_kind_share_a_batch() -> None:
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {}, {"temperature": 0.6, "top_k": 7}, {"top_p": 0.8}]
    kinds += [{"temperature": 1.7, "min_p": 0.05}, {"top_k": 30, "top_p": 0.9, "min_p": 0.01}]
    samplings = [Sampling(max_new_tokens=1, **kind) for kind in kinds] * 20
    logits, banned = random_logits(len(samplings), 900), (3, 77, 898, 899)
    u = torch.from_numpy(uniforms(2, 1, len(samplings))[0])
    tokens, logprobs = draw_rows(logits, u, samplings, banned)
    likeliest = logits.index_fill(1, torch.tensor(banned), -torch.inf).argmax(-1)
    assert torch.equal(tokens[:: len(kinds)], likeliest[:: len(kinds)]), "greedy rows"
    for row, sampling in enumerate(samplings):
        alone, logprob = draw_rows(logits[row : row + 1], u[row : row + 1], [sampling], banned)
        scaled = logits[row : row + 1] / (sampling.temperature or 1)
        expected = SuppressTokensLogitsProcessor(banned)(None, scaled)[0].log_softmax(-1)[tokens[row]]
        assert tokens[row] == alone[0]
        assert tokens[row] not in banned
        torch.testing.assert_close(logprobs[row], expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(logprob[0], expected, atol=1e-6, rtol=0)


BOX, TAG = AnswerEnd(), AnswerEnd(closing="</a>")
THOUGHT = AnswerEnd(after="</think>")
WRITTEN = (
    r"see \boxed{\frac{1}{2}}}. Then \boxed{3}\n\n",
    r"in \boxed{} it is \boxed{\boxed{7} \} é}: yes é",
    r"<think>\boxed{1}</think> so \boxed {4} or <a>5</a>",
)


@table(
    ("text", "end", "answered"),
    [
        (WRITTEN[0], BOX, r"see \boxed{\frac{1}{2}}"),
        (WRITTEN[1], BOX, r"in \boxed{} it is \boxed{\boxed{7} \} é}"),
        (WRITTEN[2], BOX, r"<think>\boxed{1}"),
        (WRITTEN[2], THOUGHT, r"<think>\boxed{1}</think> so \boxed {4}"),
        (WRITTEN[2], TAG, WRITTEN[2]),
        (r"{ \boxed{5} and", BOX, r"{ \boxed{5}"),
        (r"\boxed{5", BOX, None),
        (r"\boxed{1}", THOUGHT, None),
        (r"\boxed{ }", BOX, None),
    ],
)
def test_the_end_of_an_answer(text: str, end: AnswerEnd, answered: str | None) -> None:
    found = find_answer_end(text, end)
    assert (None if found is None else text[:found]) == answered


@cache
def boxing() -> TinyParts:
    """A model that writes WRITTEN, with more or less luck."""
    parts = tiny("qwen3_vl")
    answers = zip(mixed_prompts(parts), map(renderer(parts).target, WRITTEN), strict=True)
    pairs = [SftExample(prompt=prompt, answer_ids=ids) for prompt, ids in answers]
    trainer = supervised_trainer(VLM(parts.network, parts.processor.banned_ids), Warmup(learning_rate=3e-3))
    for _ in range(60):
        trainer.update(pairs)
    return parts


def cut(whole: Completion, end: AnswerEnd, tokenizer: PreTrainedTokenizerBase) -> Completion:
    """The untouched completion up to the first token with which its text has an answer, found token by token."""
    ids = whole.token_ids_T.tolist()
    for length in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:length], skip_special_tokens=True)
        if find_answer_end(text, end) is not None:
            return completion_of(ids[:length], logprobs_T=whole.logprobs_T[:length], text=text)
    return whole


RARELY, PAGED = partial(make_engine, decode_steps_per_wait=5), partial(make_engine, cache="paged", page_tokens=4)


@pytest.mark.parametrize("make", [make_engine, RARELY, PAGED, plain_engine], ids=["dense", "rarely", "paged", "plain"])
def test_completions_are_the_untouched_ones_cut_at_the_token_that_closes_the_answer(make: Callable[..., Any]) -> None:
    parts, ends = boxing(), (BOX, TAG, THOUGHT)
    prompts = [prompt for prompt in mixed_prompts(parts) for _ in ends]

    def sampled(given: tuple[AnswerEnd | None, ...]) -> list[Completion]:
        settings = [Sampling(max_new_tokens=48, seed=3, answer_end=end) for end in given * 3]
        return [each for group in generate(make(parts), prompts, settings, n=6) for each in group]

    wholes, shorts = sampled((None, None, None)), sampled(ends)
    wanted = [cut(whole, ends[place // 6 % 3], parts.processor.tokenizer) for place, whole in enumerate(wholes)]
    assert same(shorts, wanted)
    dropped = [len(whole.token_ids_T) - len(short.token_ids_T) for whole, short in zip(wholes, shorts, strict=True)]
    assert sum(map(bool, dropped)) > len(dropped) // 3, "the model boxes its answers, and goes on"
    spans = [short.text for short in shorts if (at := find_answer_end(short.text, BOX)) and short.text[at:]]
    assert spans, "some token closes the box and writes on"


def test_an_answer_beside_a_stop_string_ends_at_the_first_of_both() -> None:
    stops: tuple[tuple[str, ...], ...] = ((), (" Then",), ("fr",))
    settings = [Sampling(max_new_tokens=48, temperature=0, stop=stop, answer_end=BOX) for stop in stops]
    groups = generate(make_engine(boxing()), mixed_prompts(boxing())[:1] * 3, settings, 1)
    first, same_end, earlier = (group[0].text for group in groups)
    assert first == same_end
    assert first.startswith(earlier)
    assert len(earlier) < len(first)


FILES = {f"{split}_files": [f"{split}.parquet"] for split in ("train", "dev", "test")}


class Tagged(BanditEnvironment):
    answer_end = TAG


@table(
    ("given", "end"),
    [
        ({"name": "shapes"}, BOX),
        ({"name": "shapes_zoom"}, BOX),
        ({"name": "geo3k", "think_tags": True, **FILES}, THOUGHT),
        ({"name": "mixture", "parts": {n: {"environment": {"name": "shapes"}, "share": 1} for n in "ab"}}, BOX),
        (Tagged(), TAG),
        (BanditEnvironment(), None),
        ({"name": "vqa", **FILES}, None),
    ],
)
def test_an_environment_says_where_its_answers_end(given: object, end: AnswerEnd | None) -> None:
    settings = {"model": {"tiny": {}}, "rollout": {"stop_after_answer": True}}
    config = Config.model_validate(settings | {"environment": given if isinstance(given, dict) else {"name": "shapes"}})
    environment = make_environment(config, None if isinstance(given, dict) else given).environment
    if end is not None:
        assert rollout_sampling(config, environment).answer_end == end
        return
    with pytest.raises(ConfigError, match=r"stop_after_answer=true, but environment=\w+ does not say where an answer"):
        rollout_sampling(config, environment)
