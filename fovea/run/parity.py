"""The parity gate at the start of a run: the trainer's log-probs of tokens that the engine sampled must agree.

Two computations of a log-prob differ by rounding: about 0.03 on average between two engines in bfloat16. A mean of 0.7,
or a difference only on prompts with images, means wrong positions: such a run trains on noise or collapses days later,
so that the gate is on by default. How large a difference is depends on the model, so that the trainer also scores the
tokens under known faults (`run.parity_faults`), which are a yardstick. The gate leaves the run unchanged: it takes rows
outside of the data order, and random numbers belong to requests.

Axes: `A` action tokens of all completions of a prompt.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy import float32
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from fovea.environments.prompt_source import PromptedTask
from fovea.rollout.collect import conversations, request_seed
from fovea.run.context import Run
from fovea.run.parity_faults import faulty_groups
from fovea.run.parity_reading import DrawnToken, FaultReading, Gap, KindReading, ParityReading, nan_as_infinity
from fovea.run.parity_rows import PromptKind, usable_prompts
from fovea.run.rollout_step import training_sampling
from fovea.samples import sample_group
from fovea.train.base import Needs
from fovea.types import Batch, Episode, Group, Request, SampleGroup, Sampling, Score
from fovea.utils.files import json_number, write_atomically

PARITY_FILE = "parity.json"
SAMPLES_PER_PROMPT = 2
"""Completions per prompt: the smallest group, so that completions share a prompt as in a rollout."""


def write_parity(folder: Path, reading: ParityReading, version: int) -> None:
    """Write parity.json, with the policy's version as its step."""
    write_atomically(folder / PARITY_FILE, _json(reading, version).encode())


async def read_parity(run: Run) -> ParityReading:
    """Sample completions from the engine, and compare their log-probs with the policy's, sound and under faults."""
    settings = run.config.parity
    prompts = usable_prompts(
        run.sources.train,
        run.environment,
        settings.prompts,
        max_seconds=settings.max_search_seconds,
        say=run.progress.stage,
    )
    groups = await _draw(run, prompts)
    faults = list(faulty_groups(groups, run.image_token_id))
    scored = await _scores(run, [*groups, *(group for _, _, group in faults)])
    sound, faulty = scored[: len(groups)], scored[len(groups) :]
    kinds = [_kind(group) for group in groups]
    return ParityReading(
        model=run.config.model.name,
        engine=run.engine.name,
        limit=settings.max_abs_logprob_diff,
        max_k3=settings.max_k3,
        dtype=run.config.model.dtype,
        kinds=tuple(
            kind_reading(kind, kinds.count(kind), _tokens(run.token_text, kind, groups, sound))
            for kind in ("with images", "without images") if kind in kinds
        ),
        faults=tuple(_fault_readings(groups, sound, [(name, index) for name, index, _ in faults], faulty)),
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


async def _draw(run: Run, prompts: Sequence[tuple[PromptKind, PromptedTask]]) -> list[SampleGroup]:
    """Sample completions of all prompts concurrently, as in a rollout; those with images to the end of their episodes."""
    several_turns = run.environment.max_turns > 1

    async def one(index: int, kind: PromptKind, prompted: PromptedTask) -> SampleGroup:
        request = Request(
            id=f"parity/{index}",
            prompt=prompted.prompt,
            sampling=replace(_sampling(run), seed=request_seed(run.config.seed, index)),
            n=SAMPLES_PER_PROMPT,
            for_update=not several_turns,  # the same path through the engine as a rollout's
            keep=several_turns and kind == "with images",
        )
        turns = await conversations(run.engine, run.environment, run.sources.train.renderer, prompted, request)
        episodes = tuple(Episode(task=prompted.task, turns=each, score=_UNSCORED) for each in turns)
        group = sample_group(Group(prompt=prompted.prompt, episodes=episodes), _ZEROS, _ZEROS)
        # without completion ids, so that the trainer recomputes everything instead of reusing recorded activations
        return replace(group, samples=tuple(replace(sample, completion_ids=()) for sample in group.samples))

    return await asyncio.gather(*(one(index, *each) for index, each in enumerate(prompts)))


_UNSCORED, _ZEROS = Score(reward=0.0, accuracy=0.0), (0.0,) * SAMPLES_PER_PROMPT


def _sampling(run: Run) -> Sampling:
    """Sampling parameters of the rollout, approximate weights included, with a lower token limit."""
    sampling = training_sampling(run.config)
    return replace(sampling, max_new_tokens=min(run.config.parity.max_new_tokens, sampling.max_new_tokens))


async def _scores(run: Run, groups: Sequence[SampleGroup]) -> list[NDArray[float32]]:
    """The policy's log-probs [A] of each group."""
    annotated = await run.policy.annotate(Batch(groups=tuple(groups)), Needs(old_logprobs=True))
    return [
        np.concatenate([sample.old_logprobs_T[sample.mask_T] for sample in group.samples if sample.old_logprobs_T is not None])
        for group in annotated.groups
    ]


def _engine_logprobs(group: SampleGroup) -> NDArray[float32]:
    """The engine's log-probs [A] of a group."""
    return np.concatenate([sample.rollout_logprobs_T[sample.mask_T] for sample in group.samples])


def _kind(group: SampleGroup) -> PromptKind:
    return "with images" if group.images else "without images"


def _fault_readings(
    groups: Sequence[SampleGroup],
    sound: Sequence[NDArray[float32]],
    places: Sequence[tuple[str, int]],
    faulty: Sequence[NDArray[float32]],
) -> list[FaultReading]:
    """The engine's distance from each fault and from the sound trainer, on the groups that the fault changes."""
    parts = defaultdict[str, list[tuple[NDArray[float32], ...]]](list)
    for (name, index), faulty_A in zip(places, faulty, strict=True):
        parts[name].append((_engine_logprobs(groups[index]), sound[index], faulty_A))
    return [
        FaultReading.of(name, *(np.concatenate(column) for column in zip(*of_fault, strict=True)))
        for name, of_fault in parts.items()
    ]


def _tokens(
    token_text: Callable[[int], str], kind: PromptKind, groups: Sequence[SampleGroup], sound: Sequence[NDArray[float32]]
) -> list[DrawnToken]:
    """The tokens of the prompts of one kind."""
    return [
        DrawnToken(
            row=group.task_id,
            number=number,
            token_id=int(index),
            text=token_text(int(index)),
            engine_logprob=float(engine),
            trainer_logprob=float(trainer),
        )
        for group, scored_A in zip(groups, sound, strict=True)
        if _kind(group) == kind
        for number, index, engine, trainer in zip(*_columns(group), scored_A, strict=True)
    ]


def _columns(group: SampleGroup) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[float32]]:
    """Numbers within their completions, ids and the engine's log-probs of the sampled tokens, [A] each."""
    numbers = [np.arange(1, sample.num_actions + 1) for sample in group.samples]
    ids = [sample.token_ids_T[sample.mask_T] for sample in group.samples]
    return np.concatenate(numbers), np.concatenate(ids), _engine_logprobs(group)


def kind_reading(kind: PromptKind, prompts: int, tokens: Sequence[DrawnToken]) -> KindReading:
    """Parity over these tokens."""
    gap = Gap.of([token.engine_logprob for token in tokens], [token.trainer_logprob for token in tokens])
    return KindReading(
        kind=kind,
        prompts=prompts,
        tokens=len(tokens),
        mean_abs=gap.mean_abs,
        k3=gap.k3,
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
