"""The parity gate at the start of a run: the trainer's log-probs of tokens that the engine sampled must agree.

Two computations of a log-prob differ by rounding: about 0.03 on average between two engines in bfloat16. A mean of 0.7,
or a difference only on prompts with images, means wrong positions: such a run trains on noise or collapses days later,
so that the gate is on by default. It leaves the run unchanged: it takes rows outside of the data order, and random
numbers belong to requests.
"""

from __future__ import annotations

import asyncio
import json
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
from fovea.run.parity_reading import DrawnToken, KindReading, ParityReading, nan_as_infinity
from fovea.run.parity_rows import PromptKind, usable_prompts
from fovea.run.rollout_step import training_sampling
from fovea.train.base import Needs, Policy
from fovea.types import Batch, Completion, Request, Sample, SampleGroup, Sampling
from fovea.utils.files import json_number, write_atomically

PARITY_FILE = "parity.json"
SAMPLES_PER_PROMPT = 2
"""Completions per prompt: the smallest group, so that completions share a prompt as in a rollout."""


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
        max_k3=config.parity.max_k3,
        kinds=tuple(
            kind_reading(kind, sum(each.kind == kind for each in drawn), of_kind)
            for kind, of_kind in tokens.items()
            if of_kind
        ),
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


def kind_reading(kind: PromptKind, prompts: int, tokens: Sequence[DrawnToken]) -> KindReading:
    engine = torch.tensor([token.engine_logprob for token in tokens])
    trainer = torch.tensor([token.trainer_logprob for token in tokens])
    return KindReading(
        kind=kind,
        prompts=prompts,
        tokens=len(tokens),
        mean_abs=float((engine - trainer).abs().mean()),
        k3=float(k3(engine, trainer).mean()),
        worst=max(tokens, key=lambda token: nan_as_infinity(token.gap)),
    )


def summary_line(reading: ParityReading) -> str:
    """One line about a parity result: the verdict, with the difference that it is about."""
    verdict = "agree" if reading.passed else "differ"
    broken = reading.violation
    if broken is not None and reading.worst.mean_abs <= reading.limit:
        return f"engine and trainer differ (on prompts {broken.kind.kind} they {broken.text}; {PARITY_FILE})"
    return f"engine and trainer {verdict} ({reading.worst.mean_abs:.1g}, limit {reading.limit:g}; {PARITY_FILE})"


def _json(reading: ParityReading, step: int) -> str:
    about = {"step": step, "model": reading.model, "engine": reading.engine, "passed": reading.passed}
    kinds = [_kind_json(kind) for kind in reading.kinds]
    limits = {"max_abs_logprob_diff": reading.limit, "max_k3": reading.max_k3}
    return json.dumps(about | limits | {"prompts": kinds}, indent=2) + "\n"


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
