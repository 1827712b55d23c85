"""The parity gate at the start of a run: the trainer's log-probs of tokens that the engine sampled must agree.

Two computations of a log-prob differ by rounding: about 0.03 on average between two engines in bfloat16. A mean of 0.7,
or a difference only on prompts with images, means wrong positions: such a run trains on noise or collapses days later.
Whether a difference is large depends on the model, so the trainer also scores the tokens with known faults applied
(`run.parity_faults`). The gate reads rows without advancing the data order, and leaves the run unchanged. Axes: `A`
action tokens of a group.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np
from rich.table import Table
from rich.text import Text

from fovea.data.prompt_source import PromptedTask
from fovea.errors import ParityError
from fovea.rollout.collect import EngineSpeaker, first_turns, request_seed, session_seed
from fovea.rollout.conversation import Conversations, SessionLog
from fovea.run.context import Run
from fovea.run.parity_faults import (
    Array,
    Columns,
    PromptKind,
    as_new,
    engine_logprobs,
    faulty_groups,
    usable_prompts,
)
from fovea.run.parity_result import (
    FLOOR_FRAC,
    FaultMismatch,
    KindMismatch,
    Mismatch,
    ParityResult,
    SampledToken,
    kind_of,
    nan_as_infinity,
    nearest_fault,
    parity_failure,
)
from fovea.run.sampling import training_sampling
from fovea.samples import sample_group
from fovea.train.base import Needs
from fovea.types import Batch, Episode, Group, Metrics, Request, SampleGroup
from fovea.weights.base import SyncReport
from fovea_gym.errors import SessionError
from fovea_gym.types import Score, Turn
from fovea_gym.utils.event_loop import gather_or_cancel
from fovea_gym.utils.files import json_number, write_atomically

PARITY_FILE = "parity.json"
MAX_SEARCH_SECONDS = 300.0
"""Longest search for usable training rows, which is slow if hosts of images do not answer."""
K3_FACTOR = 4
"""Largest allowed k3, in units of d^2 / 2: the k3 of tokens that all differ by d, the largest allowed mean difference.
A few tokens that are far off raise k3 more than the mean."""
SAMPLES_PER_PROMPT = 2
"""Completions per prompt: the smallest number with a shared prompt, as in a rollout."""
_UNSCORED, _ZEROS = Score(reward=0.0, accuracy=0.0), (0.0,) * SAMPLES_PER_PROMPT
MAX_NEW_TOKENS = 32
"""Longest completion of the gate, in tokens: a fault shows within a few, and the start of the run waits for all."""
SYNC_PROMPTS = 4
"""Number of prompts to compare after a weight sync: two rows, each with and without its images."""
GROSS_FACTOR = 5
"""Multiple of the limit that two correct computations with the same weights never reach."""
MAX_NAMED = 3
MIN_SAMPLES = 16
"""Fewest completions of a step to compare with faults: even with one token each, enough for the sign test."""


async def read_parity(run: Run, version: int) -> ParityResult:
    """Sample completions from the engine, and compare their log-probs with the policy's, as it is and with faults."""
    settings = run.config.parity
    prompts = usable_prompts(
        run.sources.train,
        run.environment,
        settings.prompts,
        max_seconds=MAX_SEARCH_SECONDS,
        say=run.progress.stage,
    )
    sessions = SessionLog()
    groups = await _draw(run, prompts, version, as_for_update=True, sessions=sessions)
    if failures := sessions.failures:
        named = "; ".join(map(str, failures[:MAX_NAMED]))
        text = f"{len(failures)} of {sessions.num_episodes} sessions of the parity gate failed: {named}"
        if len(failures) == sessions.num_episodes:
            raise SessionError(f"{text}; correct the environment")
        run.progress.warn(text)
    result, sound = await _beside_faults(run, groups)
    run.taken_sync.prompts = prompts[:SYNC_PROMPTS]
    run.taken_sync.remember(version, groups[:SYNC_PROMPTS], sound[:SYNC_PROMPTS])
    return result


async def _beside_faults(run: Run, groups: Sequence[SampleGroup]) -> tuple[ParityResult, Sequence[Array]]:
    """Compare engine and policy, as they are and with faults; also returns the policy's own log-probs [A] by group."""
    model = run.config.model
    packed = run.has_fast_path and model.fast_path == "auto" and run.config.train.backend.name == "torch"
    faults = list(faulty_groups(groups, run.image_token_id, packed=packed))
    scored = await _score(run, [*groups, *(group for _, _, group in faults)])
    sound, faulty = scored[: len(groups)], scored[len(groups) :]
    columns = defaultdict[str, list[Columns]](list)
    for (name, index, _), faulty_A in zip(faults, faulty, strict=True):
        columns[name].append((engine_logprobs(groups[index]), sound[index], faulty_A))
    results = [FaultMismatch.of(name, of_fault) for name, of_fault in columns.items()]
    return _result(run, groups, sound, results), sound


async def read_synced_parity(run: Run, version: int) -> ParityResult:
    """Compare log-probs after a weight sync, also with those before it on the tokens that were sampled both times."""
    groups = await _draw(run, run.taken_sync.prompts, version, as_for_update=False)
    sound = await _score(run, groups)
    stale = run.taken_sync.beside(groups, sound)
    faults = [FaultMismatch.of(f"the weights of version {run.taken_sync.version}", stale)] if stale else []
    result = _result(run, groups, sound, faults)
    if not result.doubtful:
        run.taken_sync.remember(version, groups, sound)
    return result


async def _draw(
    run: Run,
    prompts: Sequence[tuple[PromptKind, PromptedTask]],
    version: int,
    *,
    as_for_update: bool,
    sessions: SessionLog | None = None,
) -> list[SampleGroup]:
    """Sample completions of all prompts concurrently, as in a rollout; prompts with images run whole episodes.

    `as_for_update`: use the engine's path for training completions, whose recorded activations a weight sync frees.
    """
    several_turns = run.environment.max_turns > 1
    sampling = training_sampling(run.config, run.environment)  # keeps approximate decode weights, as in training
    sampling = replace(sampling, max_new_tokens=min(MAX_NEW_TOKENS, sampling.max_new_tokens))
    talking = [index for index, (kind, _) in enumerate(prompts) if kind == "with images"]
    places = [(index, number) for index in talking for number in range(SAMPLES_PER_PROMPT)]
    talks = Conversations.of(run.environment, places, engine=run.engine, log=sessions)

    async def one(index: int, kind: PromptKind, prompted: PromptedTask) -> SampleGroup:
        request = Request(
            id=f"parity/{version}/{index}",
            prompt=prompted.prompt,
            sampling=replace(sampling, seed=request_seed(run.config.seed, index)),
            n=SAMPLES_PER_PROMPT,
            for_update=as_for_update and not several_turns,
            keep=several_turns and kind == "with images",
        )
        firsts = await first_turns(run.engine, run.environment, prompted, request)
        turns: Sequence[tuple[Turn, ...]] = [(first,) for first in firsts]
        if request.keep:
            speakers = [EngineSpeaker(run.engine, run.stream.interaction, prompted, request) for _ in firsts]
            found = await gather_or_cancel(
                talks.go_on(prompted.task, session_seed(request, number), firsts[number], speaker, (index, number))
                for number, speaker in enumerate(speakers)
            )
            # if a session failed, the episode has the turns before the failure
            turns = [each.turns for each in found]
        episodes = tuple(Episode(task=prompted.task, turns=each, score=_UNSCORED) for each in turns)
        return _recomputed(sample_group(Group(prompt=prompted.prompt, episodes=episodes), _ZEROS, _ZEROS))

    return await gather_or_cancel(one(index, *each) for index, each in enumerate(prompts))


def _recomputed(group: SampleGroup) -> SampleGroup:
    """The group's samples on the unaugmented images, without old log-probs and recorded activations."""
    drawn = [sample for sample in group.samples if not sample.is_noisy]
    samples = [replace(sample, completion_ids=(), old_logprobs_T=None, masked_logprobs_T=None) for sample in drawn]
    return replace(group, samples=tuple(samples), masked=None)


async def _score(run: Run, groups: Sequence[SampleGroup]) -> list[Array]:
    """The policy's log-probs [A] of each group."""
    with_logprobs = await run.policy.compute_logprobs(
        Batch(groups=tuple(groups)), Needs(old_logprobs=True, beside_engine=True)
    )
    found = []
    for group in with_logprobs.groups:
        scored = [(sample.old_logprobs_T, sample.mask_T) for sample in group.samples]
        found.append(np.concatenate([values_T[mask_T] for values_T, mask_T in scored if values_T is not None]))
    return found


def parity_table(result: ParityResult) -> Table:
    """Table of a parity result, one row per kind of prompt."""
    title = Text(f"{result.model}: the {result.engine} engine against the trainer")  # Text: names are not rich markup
    table = Table(title=title, title_justify="left")
    for header in ("prompts", "tokens", "mean abs", "max abs", "k3", "worst token"):
        table.add_column(header, justify="left" if header in ("prompts", "worst token") else "right")
    for kind in result.kinds:
        token = kind.worst
        table.add_row(
            f"{kind.prompts} {kind.kind}",
            str(kind.tokens),
            f"{kind.mean_abs:.2g}",
            f"{token.mismatch:.2g}",
            f"{kind.k3:.2g}",
            Text(f"{token.text!r} of {token.row}"),
        )
    return table


def _result(
    run: Run, groups: Sequence[SampleGroup], sound: Sequence[Array], faults: Sequence[FaultMismatch]
) -> ParityResult:
    settings = run.config.parity
    tokens: dict[PromptKind, list[SampledToken]] = {"with images": [], "without images": []}
    for group, sound_A in zip(groups, sound, strict=True):
        tokens[kind_of(group)] += _tokens(run.token_text, group, sound_A)
    return ParityResult(
        model=run.config.model.name,
        engine=run.engine.name,
        limit=settings.max_abs_logprob_diff,
        max_k3=K3_FACTOR * settings.max_abs_logprob_diff**2 / 2,
        dtype=run.config.model.dtype,
        kinds=tuple(
            kind_mismatch(kind, sum(kind_of(group) == kind for group in groups), of_kind)
            for kind, of_kind in tokens.items()
            if of_kind
        ),
        faults=tuple(faults),
    )


def _tokens(token_text: Callable[[int], str], group: SampleGroup, sound_A: Array) -> list[SampledToken]:
    numbers_A = np.concatenate([np.arange(1, sample.num_actions + 1) for sample in group.samples])
    ids_A = np.concatenate([sample.token_ids_T[sample.mask_T] for sample in group.samples])
    return [
        SampledToken(
            row=group.task_id,
            number=int(number),
            token_id=int(index),
            text=token_text(int(index)),
            engine_logprob=float(engine),
            trainer_logprob=float(trainer),
        )
        for number, index, engine, trainer in zip(numbers_A, ids_A, engine_logprobs(group), sound_A, strict=True)
    ]


def kind_mismatch(kind: PromptKind, prompts: int, tokens: Sequence[SampledToken]) -> KindMismatch:
    """Compute the mismatch over these tokens."""
    mismatch = Mismatch.of([token.engine_logprob for token in tokens], [token.trainer_logprob for token in tokens])
    return KindMismatch(
        kind=kind,
        prompts=prompts,
        tokens=len(tokens),
        mean_abs=mismatch.mean_abs,
        k3=mismatch.k3,
        worst=max(tokens, key=lambda token: nan_as_infinity(token.mismatch)),
    )


def summary_line(result: ParityResult) -> str:
    """One line about a parity result: the verdict and the measured difference."""
    verdict = "agree" if result.passed else "differ"
    broken = result.violation
    if broken is not None and result.worst.mean_abs <= result.limit:
        return f"engine and trainer differ (on prompts {broken.kind.kind} they {broken.text}; {PARITY_FILE})"
    unclear = ", ".join(fault.name for fault in result.doubtful)
    doubt = f"; cannot tell: {unclear}" if unclear and result.passed else ""
    return f"engine and trainer {verdict} ({result.worst.mean_abs:.1g}, limit {result.limit:g}{doubt}; {PARITY_FILE})"


def _json(result: ParityResult, step: int) -> str:
    about = {"step": step, "model": result.model, "engine": result.engine, "passed": result.passed}
    limits = {"max_abs_logprob_diff": result.limit, "max_k3": result.max_k3}
    found = {"prompts": [*map(_kind_json, result.kinds)], "faults": [*map(_fault_json, result.faults)]}
    return json.dumps(about | limits | found, indent=2) + "\n"


def _fault_json(fault: FaultMismatch) -> dict[str, object]:
    verdict = "ruled out" if fault.ruled_out else "found" if fault.found else "cannot tell"
    return {"fault": fault.name, "verdict": verdict, **_mismatch_json(fault.faulty)}


def _mismatch_json(mismatch: Mismatch) -> dict[str, float | None]:
    return {"mean_abs": json_number(mismatch.mean_abs), "k3": json_number(mismatch.k3)}


def _kind_json(kind: KindMismatch) -> dict[str, object]:
    worst = {k: json_number(v) if isinstance(v, float) else v for k, v in asdict(kind.worst).items()}
    means = _mismatch_json(kind) | {"max_abs": json_number(kind.worst.mismatch)}
    return {"kind": kind.kind, "prompts": kind.prompts, "tokens": kind.tokens, **means, "worst_token": worst}


async def pass_parity_gate(run: Run, version: int) -> None:
    """Measure parity, write parity.json and print one line; ParityError if a rule of the gate is broken."""
    if run.config.parity.prompts == 0:
        return
    run.progress.stage("comparing the log-probs of engine and trainer")
    result = await read_parity(run, version)
    write_atomically(run.folder / PARITY_FILE, _json(result, step=version).encode())
    run.progress.print(summary_line(result))
    # a weight sync frees the activations that the engine recorded for these completions
    await run.weight_sync.sync(version)
    if not result.passed:
        raise ParityError(parity_failure(result))


async def check_sync(run: Run, sync: SyncReport) -> None:
    """Compare log-probs of two rows after a weight sync, if the engine holds a copy of the weights; ParityError."""
    if not sync.bytes_copied or not run.taken_sync.prompts:
        return
    with run.phases("parity"):
        result = await read_synced_parity(run, sync.version)
        stale = await _read_features(run, sync.version) if run.config.model.trains_vision else None
    floor = FLOOR_FRAC[run.config.model.dtype] * run.config.parity.max_abs_logprob_diff
    if stale is not None and stale.found and stale.sound.mean_abs > floor:
        raise ParityError(
            f"after the weight sync of version {sync.version}, log-probs of the {run.engine.name} engine and of the "
            f"trainer differ by {stale.sound.mean_abs:.2g} on images that the engine has seen before, and by "
            f"{stale.faulty.mean_abs:.2g} where the same images are new to it: it still uses image features of older "
            "weights of the vision tower. Clear its cache of image features at each weight sync (vLLM: "
            "reset_encoder_cache), or set model.freeze_vision_tower=true"
        )
    if result.sync_violation is not None:
        raise ParityError(f"after the weight sync of version {sync.version}, {parity_failure(result)}")


async def _read_features(run: Run, version: int) -> FaultMismatch | None:
    """Compare policy and engine on images that the engine has seen before, and on the same images made new to it.

    An engine that still uses features from before a weight sync is far off on the former only. None without images.
    """
    seen = [each for each in run.taken_sync.prompts if each[1].prompt.images]
    unseen = [(kind, replace(row, prompt=as_new(row.prompt, version))) for kind, row in seen]
    if not seen:
        return None
    mismatches = []
    for prompts in (seen, unseen):
        groups = await _draw(run, prompts, version, as_for_update=False)
        mismatches.append(
            np.concatenate(await _score(run, groups)) - np.concatenate(list(map(engine_logprobs, groups)))
        )
    # the two rollouts may sample different tokens, so mismatches are paired by position
    pairs_2A = np.array(list(zip(*mismatches, strict=False))).T
    return FaultMismatch.of("known images", [(np.zeros_like(pairs_2A[0]), pairs_2A[0], pairs_2A[1])])


async def check_rollout(run: Run, step: int, batch: Batch, metrics: Metrics) -> None:
    """Look for a known fault if the rollout's log-probs were far from the trainer's before the update; ParityError.

    Older weights, int8 decoding and chance move log-probs too. The run stops if a fault is found, or if the weights
    were the same and the difference is far beyond the limit of the gate. Otherwise it warns and continues.
    """
    settings = run.config.parity
    oldest = min((version for sample in batch.samples for version in sample.versions), default=step)
    staleness = max(step - oldest, 0)
    allowed = run.rollout_mismatch.allowed(settings.max_abs_logprob_diff, staleness=staleness)
    found = metrics.get("mismatch_trained/abs", 0.0)
    # also returns for NaN: such an update is skipped
    if settings.prompts == 0 or not found > allowed:
        return
    with run.phases("parity"):
        result, _ = await _beside_faults(run, _to_compare(batch.groups, settings.prompts))
    differ = (
        f"step {step + 1}: log-probs of the {run.engine.name} engine and of the trainer differ by {found:.3g} on "
        f"average, and {allowed:g} is allowed (parity.max_abs_logprob_diff for each version of the weights)"
    )
    likely = next((fault for fault in result.doubtful if fault.likely), None)
    is_gross = staleness == 0 and found > GROSS_FACTOR * settings.max_abs_logprob_diff
    if likely or is_gross:
        cause = f"The engine seems to have this fault: {likely.text}. " if likely else nearest_fault(result)
        raise ParityError(
            f"{differ}; they agreed before the first step. {cause}Find out what rollouts do differently from the "
            "parity gate, then set resume=auto to continue from the last checkpoint"
        )
    run.rollout_mismatch.explained(found, staleness=staleness)
    run.progress.warn(
        f"{differ}. {nearest_fault(result) or 'No known fault explains it. '}The run continues, and checks again when "
        "the difference has doubled; a lower train.learning_rate or rollout.max_staleness_steps reduces it"
    )


def _to_compare(groups: Sequence[SampleGroup], num_prompts: int) -> list[SampleGroup]:
    """A few groups of a step, with images first; more groups if they have too few samples for a sign test."""
    with_images_first = sorted(groups, key=lambda group: kind_of(group) == "without images")
    num_samples = np.cumsum([len(group.samples) for group in with_images_first])
    enough = int(np.searchsorted(num_samples, MIN_SAMPLES)) + 1
    return [_recomputed(group) for group in with_images_first[: max(num_prompts, enough)]]
