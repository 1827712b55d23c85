"""The parity gate at the start of a run: the trainer's log-probs of tokens that the engine sampled must agree.

Two computations of a log-prob differ by rounding: about 0.03 on average between two engines in bfloat16. A mean of 0.7,
or a difference only on prompts with images, means wrong positions: such a run trains on noise or collapses days later,
so that the gate is on by default. It leaves the run unchanged: it takes rows outside of the data order, and random
numbers belong to requests.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy import float32
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from fovea.algorithms.kl import k3
from fovea.config.run import Config
from fovea.environments.base import Environment
from fovea.environments.prompt_source import PromptedTask, PromptSource
from fovea.rollout.base import Engine
from fovea.rollout.collect import request_seed
from fovea.run.parity_rows import PromptKind, usable_prompts
from fovea.run.rollout_step import training_sampling
from fovea.train.base import Needs, Policy
from fovea.types import Batch, Completion, Request, Sample, SampleGroup, Sampling
from fovea.utils.files import json_number, write_atomically

PARITY_FILE = "parity.json"
SAMPLES_PER_PROMPT = 2
"""Completions per prompt: the smallest group, so that completions share a prompt as in a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnToken:
    """One sampled token with the log-probs of engine and trainer."""

    row: str
    """Id of its task."""
    number: int
    """Position in the completion, from 1."""
    token_id: int
    text: str
    engine_logprob: float
    trainer_logprob: float

    @property
    def gap(self) -> float:
        """Absolute difference; NaN, which exceeds any limit, where a side is not finite."""
        return abs(self.engine_logprob - self.trainer_logprob)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindReading:
    """Parity over all tokens sampled for one kind of prompt."""

    kind: PromptKind
    prompts: int
    tokens: int
    mean_abs: float
    k3: float
    """Mean of e^x - x - 1 with x = trainer - engine: the k3 estimate of KL(engine || trainer)."""
    worst: DrawnToken


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReading:
    """Result of the parity gate."""

    model: str
    engine: str
    limit: float
    kinds: tuple[KindReading, ...]

    @property
    def worst(self) -> KindReading:
        """The kind of prompt with the largest mean difference; NaN counts as larger than any number."""
        return max(self.kinds, key=lambda kind: _nan_as_infinity(kind.mean_abs))

    @property
    def passed(self) -> bool:
        return self.worst.mean_abs <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """A prompt and its sampled completions."""

    kind: PromptKind
    prompted: PromptedTask
    completions: Sequence[Completion]


def write_parity(folder: Path, reading: ParityReading, version: int) -> None:
    """Write parity.json, with the policy's version as its step."""
    write_atomically(folder / PARITY_FILE, _json(reading, version).encode())


async def read_parity(
    config: Config,
    engine: Engine,
    policy: Policy,
    source: PromptSource,
    environment: Environment,
    *,
    token_text: Callable[[int], str],
    say: Callable[[str], None],
) -> ParityReading:
    """Sample completions from the engine, and compare their log-probs with the policy's.

    `say` is told of rows that cannot be used.
    """
    settings = config.parity
    prompts = usable_prompts(source, environment, settings.prompts, max_seconds=settings.max_search_seconds, say=say)
    drawn = await _draw(engine, config, prompts)
    annotated = await policy.annotate(_batch(drawn), Needs(old_logprobs=True))
    scored = iter(annotated.samples)
    tokens: dict[PromptKind, list[DrawnToken]] = {"with images": [], "without images": []}
    for each in drawn:
        for completion in each.completions:
            trainer_T = next(scored).old_logprobs_T
            assert trainer_T is not None, "the policy was asked for log-probs"
            tokens[each.kind] += _tokens(token_text, each.prompted.task.id, completion, trainer_T)
    return ParityReading(
        model=config.model.name,
        engine=engine.name,
        limit=config.parity.max_abs_logprob_diff,
        kinds=tuple(
            _reading(kind, sum(each.kind == kind for each in drawn), of_kind)
            for kind, of_kind in tokens.items()
            if of_kind
        ),
    )


def parity_failure(reading: ParityReading) -> str:
    """Error message of a parity beyond the limit."""
    kind, token = reading.worst, reading.worst.worst
    return (
        f"{reading.model}: on prompts {kind.kind} the log-probs of the {reading.engine} engine and of the trainer "
        f"differ by {kind.mean_abs:.3g} on average, and parity.max_abs_logprob_diff={reading.limit:g}; worst is token "
        f"{token.text!r} (id {token.token_id}), number {token.number} of a completion of {token.row}: "
        f"{token.engine_logprob:.3f} in the engine, {token.trainer_logprob:.3f} in the trainer. {_likely_fix(reading)}"
    )


def parity_table(reading: ParityReading) -> Table:
    """Table of a parity result, one row per kind of prompt."""
    title = Text(f"{reading.model}: the {reading.engine} engine against the trainer")  # a name is text, not markup
    table = Table(title=title, title_justify="left")
    for header in ("prompts", "tokens", "mean abs", "max abs", "k3", "worst token"):
        table.add_column(header, justify="left" if header in ("prompts", "worst token") else "right")
    for kind in reading.kinds:
        token = kind.worst
        table.add_row(
            f"{kind.prompts} {kind.kind}",
            str(kind.tokens),
            f"{kind.mean_abs:.2g}",
            f"{token.gap:.2g}",
            f"{kind.k3:.2g}",
            Text(f"{token.text!r} of {token.row}"),
        )
    return table


async def _draw(engine: Engine, config: Config, prompts: Sequence[tuple[PromptKind, PromptedTask]]) -> list[_Drawn]:
    """Sample completions of all prompts concurrently, as in a rollout."""

    async def one(index: int, kind: PromptKind, prompted: PromptedTask) -> _Drawn:
        request = Request(
            id=f"parity/{index}",
            prompt=prompted.prompt,
            sampling=replace(_sampling(config), seed=request_seed(config.seed, index)),
            n=SAMPLES_PER_PROMPT,
            for_update=True,  # the same path through the engine as a rollout's
        )
        return _Drawn(kind=kind, prompted=prompted, completions=await engine.generate(request))

    return await asyncio.gather(*(one(index, *each) for index, each in enumerate(prompts)))


def _sampling(config: Config) -> Sampling:
    """Sampling parameters of the rollout, approximate weights included, with a lower token limit."""
    sampling = training_sampling(config)
    return replace(sampling, max_new_tokens=min(config.parity.max_new_tokens, sampling.max_new_tokens))


def _batch(drawn: Sequence[_Drawn]) -> Batch:
    """A batch to compute log-probs of."""
    # without completion ids, so that the trainer recomputes everything instead of reusing recorded activations
    groups = [
        SampleGroup(
            task_id=each.prompted.task.id,
            prompt=each.prompted.prompt,
            samples=tuple(_sample(completion) for completion in each.completions),
        )
        for each in drawn
    ]
    return Batch(groups=tuple(groups))


def _sample(completion: Completion) -> Sample:
    return Sample(
        token_ids_T=completion.token_ids_T,
        mask_T=np.ones(len(completion.token_ids_T), dtype=np.bool_),
        rollout_logprobs_T=completion.logprobs_T,
        reward=0.0,
        weight=0.0,
    )


def _tokens(
    token_text: Callable[[int], str], row: str, completion: Completion, scored_T: NDArray[float32]
) -> list[DrawnToken]:
    columns = zip(completion.token_ids_T, completion.logprobs_T, scored_T, strict=True)
    return [
        DrawnToken(
            row=row,
            number=number,
            token_id=int(index),
            text=token_text(int(index)),
            engine_logprob=float(engine),
            trainer_logprob=float(trainer),
        )
        for number, (index, engine, trainer) in enumerate(columns, start=1)
    ]


def _reading(kind: PromptKind, prompts: int, tokens: Sequence[DrawnToken]) -> KindReading:
    engine = torch.tensor([token.engine_logprob for token in tokens])
    trainer = torch.tensor([token.trainer_logprob for token in tokens])
    return KindReading(
        kind=kind,
        prompts=prompts,
        tokens=len(tokens),
        mean_abs=float((engine - trainer).abs().mean()),
        k3=float(k3(engine, trainer).mean()),
        worst=max(tokens, key=lambda token: _nan_as_infinity(token.gap)),
    )


def _nan_as_infinity(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _likely_fix(reading: ParityReading) -> str:
    if reading.engine.endswith("(int8 decoding)"):
        return "Set rollout.engine.decode_weights=exact, or raise the limit to what importance_sampling_fix may correct"
    over = [kind.kind for kind in reading.kinds if not kind.mean_abs <= reading.limit]
    if over == ["with images"] and len(reading.kinds) > 1:
        return "Without images they agree: look at the positions of image tokens and at what encodes the images"
    return (
        "Engine and trainer hold other weights, or one of them computes another model: compare both with transformers "
        "(`fovea doctor RECIPE` measures again), or raise the limit for an engine that is known to be this inexact"
    )


def summary_line(reading: ParityReading) -> str:
    """One line about a parity result: the verdict, with the difference that it is about."""
    verdict = "agree" if reading.passed else "differ"
    return f"engine and trainer {verdict} ({reading.worst.mean_abs:.1g}, limit {reading.limit:g}; {PARITY_FILE})"


def _json(reading: ParityReading, step: int) -> str:
    about = {"step": step, "model": reading.model, "engine": reading.engine, "passed": reading.passed}
    kinds = [_kind_json(kind) for kind in reading.kinds]
    return json.dumps(about | {"max_abs_logprob_diff": reading.limit, "prompts": kinds}, indent=2) + "\n"


def _kind_json(kind: KindReading) -> dict[str, object]:
    worst = {
        "row": kind.worst.row,
        "number": kind.worst.number,
        "token_id": kind.worst.token_id,
        "text": kind.worst.text,
        "engine_logprob": json_number(kind.worst.engine_logprob),
        "trainer_logprob": json_number(kind.worst.trainer_logprob),
    }
    means = {"mean_abs": json_number(kind.mean_abs), "max_abs": json_number(kind.worst.gap), "k3": json_number(kind.k3)}
    return {"kind": kind.kind, "prompts": kind.prompts, "tokens": kind.tokens, **means, "worst_token": worst}
