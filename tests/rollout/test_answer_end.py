"""Completions that end where their answer ends, sampled by a tiny model that has learnt to write boxes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from fovea.config.run import Config
from fovea.config.sections import Warmup
from fovea.models.tiny import TinyParts
from fovea.models.vlm import VLM
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


@pytest.mark.parametrize(
    "make",
    [
        make_engine,
        partial(make_engine, decode_steps_per_wait=5),
        partial(make_engine, cache="paged", page_tokens=4),
        plain_engine,
    ],
    ids=["dense", "waits rarely", "paged", "plain"],
)
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
