"""The parity gate at the start of a run: the trainer's log-probs of tokens that the engine sampled must agree.

Two computations of a log-prob differ by rounding: about 0.03 on average between two engines in bfloat16. A mean of 0.7,
or a difference only on prompts with images, means wrong positions: such a run trains on noise or collapses days later.
How large a difference is depends on the model, so that the trainer also scores the tokens under known faults
(`run.parity_faults`). The gate takes rows outside of the data order, and leaves the run unchanged. Axes: `A` action
tokens of a group.
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
from fovea.run.parity_reading import (
    FLOOR_FRAC,
    DrawnToken,
    FaultReading,
    Gap,
    KindReading,
    ParityReading,
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
"""Time for finding usable training rows, long where hosts of images do not answer; those found by then are all."""
K3_FACTOR = 4
"""Largest k3, as a multiple of its value d^2 / 2 where all tokens differ by the largest mean difference d: a few tokens
that are far off move it more than the mean."""
SAMPLES_PER_PROMPT = 2
"""Completions per prompt: the smallest group, so that completions share a prompt as in a rollout."""
_UNSCORED, _ZEROS = Score(reward=0.0, accuracy=0.0), (0.0,) * SAMPLES_PER_PROMPT
MAX_NEW_TOKENS = 32
"""Longest completion of the check, in tokens: a fault shows within a few, and the start of a run waits for all."""
PUSH_PROMPTS = 4
"""Prompts that are compared after a push: two rows, with and without their images."""
GROSS_FACTOR = 5
"""Multiple of the limit that two sound computations by the same weights do not reach."""
MAX_NAMED = 3
MIN_SAMPLES = 16
"""Completions of a step that are compared under faults: with a token each, enough for the sign test."""


async def read_parity(run: Run, version: int) -> ParityReading:
    """Sample completions from the engine, and compare their log-probs with the policy's, sound and under faults."""
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
    _say_failures(run, sessions)
    reading, sound = await _beside_faults(run, groups)
    run.taken_push.prompts = prompts[:PUSH_PROMPTS]
    run.taken_push.remember(version, groups[:PUSH_PROMPTS], sound[:PUSH_PROMPTS])
    return reading


def _say_failures(run: Run, sessions: SessionLog) -> None:
    """Print how many sessions of the gate failed, and why; SessionError where all did."""
    failures = sessions.failures
    if not failures:
        return
    named = "; ".join(map(str, failures[:MAX_NAMED]))
    text = f"{len(failures)} of {sessions.num_episodes} sessions of the parity gate failed: {named}"
    if len(failures) == sessions.num_episodes:
        raise SessionError(f"{text}; correct the environment")
    run.progress.warn(text)


async def _beside_faults(run: Run, groups: Sequence[SampleGroup]) -> tuple[ParityReading, Sequence[Array]]:
    """The engine's log-probs beside the policy's, sound and under faults; also the sound ones [A] of each group."""
    model = run.config.model
    packed = run.has_fast_path and model.fast_path == "auto" and run.config.train.backend.name == "torch"
    faults = list(faulty_groups(groups, run.image_token_id, packed=packed))
    scored = await _score(run, [*groups, *(group for _, _, group in faults)])
    sound, faulty = scored[: len(groups)], scored[len(groups) :]
    columns = defaultdict[str, list[Columns]](list)
    for (name, index, _), faulty_A in zip(faults, faulty, strict=True):
        columns[name].append((engine_logprobs(groups[index]), sound[index], faulty_A))
    readings = [FaultReading.of(name, of_fault) for name, of_fault in columns.items()]
    return _reading(run, groups, sound, readings), sound


async def read_pushed_parity(run: Run, version: int) -> ParityReading:
    """Compare log-probs of a few completions after a push, also with the policy's before it on tokens drawn again."""
    groups = await _draw(run, run.taken_push.prompts, version, as_for_update=False)
    sound = await _score(run, groups)
    stale = run.taken_push.beside(groups, sound)
    faults = [FaultReading.of(f"the weights of version {run.taken_push.version}", stale)] if stale else []
    reading = _reading(run, groups, sound, faults)
    if not reading.doubtful:
        run.taken_push.remember(version, groups, sound)
    return reading


async def _draw(
    run: Run,
    prompts: Sequence[tuple[PromptKind, PromptedTask]],
    version: int,
    *,
    as_for_update: bool,
    sessions: SessionLog | None = None,
) -> list[SampleGroup]:
    """Sample completions of all prompts concurrently, as in a rollout; those with images to the end of their episodes.

    `as_for_update`: on the engine's path for completions to train on, whose recorded activations a push frees.
    """
    several_turns = run.environment.max_turns > 1
    sampling = training_sampling(run.config, run.environment)  # approximate weights included
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
            # of an episode whose session failed, the turns before that
            turns = [each.turns for each in found]
        episodes = tuple(Episode(task=prompted.task, turns=each, score=_UNSCORED) for each in turns)
        return _recomputed(sample_group(Group(prompt=prompted.prompt, episodes=episodes), _ZEROS, _ZEROS))

    return await gather_or_cancel(one(index, *each) for index, each in enumerate(prompts))


def _recomputed(group: SampleGroup) -> SampleGroup:
    """The group's samples on the pictures that the engine had, without old log-probs and recorded activations."""
    drawn = [sample for sample in group.samples if not sample.on_view]
    samples = [replace(sample, completion_ids=(), old_logprobs_T=None, masked_logprobs_T=None) for sample in drawn]
    return replace(group, samples=tuple(samples), masked=None)


async def _score(run: Run, groups: Sequence[SampleGroup]) -> list[Array]:
    """The policy's log-probs [A] of each group."""
    annotated = await run.policy.annotate(Batch(groups=tuple(groups)), Needs(old_logprobs=True, beside_engine=True))
    found = []
    for group in annotated.groups:
        scored = [(sample.old_logprobs_T, sample.mask_T) for sample in group.samples]
        found.append(np.concatenate([values_T[mask_T] for values_T, mask_T in scored if values_T is not None]))
    return found


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


def _reading(
    run: Run, groups: Sequence[SampleGroup], sound: Sequence[Array], faults: Sequence[FaultReading]
) -> ParityReading:
    settings = run.config.parity
    tokens: dict[PromptKind, list[DrawnToken]] = {"with images": [], "without images": []}
    for group, sound_A in zip(groups, sound, strict=True):
        tokens[kind_of(group)] += _tokens(run.token_text, group, sound_A)
    return ParityReading(
        model=run.config.model.name,
        engine=run.engine.name,
        limit=settings.max_abs_logprob_diff,
        max_k3=K3_FACTOR * settings.max_abs_logprob_diff**2 / 2,
        dtype=run.config.model.dtype,
        kinds=tuple(
            kind_reading(kind, sum(kind_of(group) == kind for group in groups), of_kind)
            for kind, of_kind in tokens.items()
            if of_kind
        ),
        faults=tuple(faults),
    )


def _tokens(token_text: Callable[[int], str], group: SampleGroup, sound_A: Array) -> list[DrawnToken]:
    numbers_A = np.concatenate([np.arange(1, sample.num_actions + 1) for sample in group.samples])
    ids_A = np.concatenate([sample.token_ids_T[sample.mask_T] for sample in group.samples])
    return [
        DrawnToken(
            row=group.task_id,
            number=int(number),
            token_id=int(index),
            text=token_text(int(index)),
            engine_logprob=float(engine),
            trainer_logprob=float(trainer),
        )
        for number, index, engine, trainer in zip(numbers_A, ids_A, engine_logprobs(group), sound_A, strict=True)
    ]


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
    unclear = ", ".join(fault.name for fault in reading.doubtful)
    doubt = f"; cannot tell: {unclear}" if unclear and reading.passed else ""
    return f"engine and trainer {verdict} ({reading.worst.mean_abs:.1g}, limit {reading.limit:g}{doubt}; {PARITY_FILE})"


def _json(reading: ParityReading, step: int) -> str:
    about = {"step": step, "model": reading.model, "engine": reading.engine, "passed": reading.passed}
    limits = {"max_abs_logprob_diff": reading.limit, "max_k3": reading.max_k3}
    found = {"prompts": [*map(_kind_json, reading.kinds)], "faults": [*map(_fault_json, reading.faults)]}
    return json.dumps(about | limits | found, indent=2) + "\n"


def _fault_json(fault: FaultReading) -> dict[str, object]:
    verdict = "ruled out" if fault.ruled_out else "found" if fault.found else "cannot tell"
    return {"fault": fault.name, "verdict": verdict, **_gap_json(fault.faulty)}


def _gap_json(gap: Gap) -> dict[str, float | None]:
    return {"mean_abs": json_number(gap.mean_abs), "k3": json_number(gap.k3)}


def _kind_json(kind: KindReading) -> dict[str, object]:
    worst = {k: json_number(v) if isinstance(v, float) else v for k, v in asdict(kind.worst).items()}
    means = _gap_json(kind) | {"max_abs": json_number(kind.worst.gap)}
    return {"kind": kind.kind, "prompts": kind.prompts, "tokens": kind.tokens, **means, "worst_token": worst}


async def pass_parity_gate(run: Run, version: int) -> None:
    """Measure parity, write parity.json and print one line; ParityError beyond the limit."""
    if run.config.parity.prompts == 0:
        return
    run.progress.stage("comparing the log-probs of engine and trainer")
    reading = await read_parity(run, version)
    write_atomically(run.folder / PARITY_FILE, _json(reading, step=version).encode())
    run.progress.print(summary_line(reading))
    # a push frees the activations that the engine recorded of these completions
    await run.weight_sync.push(version)
    if not reading.passed:
        raise ParityError(parity_failure(reading))


async def check_push(run: Run, push: SyncReport) -> None:
    """Compare log-probs of two rows after a push to an engine that holds a copy of the weights; ParityError."""
    if not push.bytes_copied or not run.taken_push.prompts:
        return
    with run.phases("parity"):
        reading = await read_pushed_parity(run, push.version)
        stale = await _read_features(run, push.version) if run.config.model.trains_vision else None
    floor = FLOOR_FRAC[run.config.model.dtype] * run.config.parity.max_abs_logprob_diff
    if stale is not None and stale.found and stale.sound.mean_abs > floor:
        raise ParityError(
            f"after the push of version {push.version}, log-probs of the {run.engine.name} engine and of the trainer "
            f"differ by {stale.sound.mean_abs:.2g} on images that the engine has seen before, and by "
            f"{stale.faulty.mean_abs:.2g} on the same images as new ones: it keeps features of images from older "
            "weights of the vision tower. Empty its cache of image features with each push (vLLM: "
            "reset_encoder_cache), or set model.freeze_vision_tower=true"
        )
    if reading.push_violation is not None:
        raise ParityError(f"after the push of version {push.version}, {parity_failure(reading)}")


async def _read_features(run: Run, version: int) -> FaultReading | None:
    """How far the policy is from the engine on images that it has seen before, and on the same images as new ones.

    An engine with features from before a push is far off on the former only. None without images.
    """
    seen = [each for each in run.taken_push.prompts if each[1].prompt.images]
    unseen = [(kind, replace(row, prompt=as_new(row.prompt, version))) for kind, row in seen]
    if not seen:
        return None
    gaps = []
    for prompts in (seen, unseen):
        groups = await _draw(run, prompts, version, as_for_update=False)
        gaps.append(np.concatenate(await _score(run, groups)) - np.concatenate(list(map(engine_logprobs, groups))))
    # tokens of two draws may differ, so that their gaps are compared pair by pair
    pairs_2A = np.array(list(zip(*gaps, strict=False))).T
    return FaultReading.of("known images", [(np.zeros_like(pairs_2A[0]), pairs_2A[0], pairs_2A[1])])


async def check_rollout(run: Run, step: int, batch: Batch, metrics: Metrics) -> None:
    """Look for a known fault in a step whose completions are far from the trainer before its update; ParityError.

    Older weights, int8 decoding and chance move log-probs too: the run stops where a fault is found, or where the
    weights were the same and the difference is far beyond the limit of the gate. Else it warns and goes on.
    """
    settings = run.config.parity
    oldest = min((version for sample in batch.samples for version in sample.versions), default=step)
    staleness = max(step - oldest, 0)
    allowed = run.rollout_gap.allowed(settings.max_abs_logprob_diff, staleness=staleness)
    found = metrics.get("rollout_train_abs/trained", 0.0)
    # not at NaN: such an update is skipped
    if settings.prompts == 0 or not found > allowed:
        return
    with run.phases("parity"):
        reading, _ = await _beside_faults(run, _to_compare(batch.groups, settings.prompts))
    differ = (
        f"step {step + 1}: log-probs of the {run.engine.name} engine and of the trainer differ by {found:.3g} on "
        f"average, and {allowed:g} is allowed (parity.max_abs_logprob_diff for each version of the weights)"
    )
    likely = next((fault for fault in reading.doubtful if fault.likely), None)
    is_gross = staleness == 0 and found > GROSS_FACTOR * settings.max_abs_logprob_diff
    if likely or is_gross:
        cause = f"The engine seems to have this fault: {likely.text}. " if likely else nearest_fault(reading)
        raise ParityError(
            f"{differ}; before the first step they agreed. {cause}Look at what rollouts do otherwise than the parity "
            "gate, then set resume=auto to go on from the last checkpoint"
        )
    run.rollout_gap.explained(found, staleness=staleness)
    run.progress.warn(
        f"{differ}. {nearest_fault(reading) or 'No known fault explains it. '}The run goes on, and looks again where "
        "the difference has doubled; a lower train.learning_rate or rollout.max_staleness_steps makes it smaller"
    )


def _to_compare(groups: Sequence[SampleGroup], num_prompts: int) -> list[SampleGroup]:
    """A few groups of a step, those with images first; more where each has too few samples for a sign test."""
    with_images_first = sorted(groups, key=lambda group: kind_of(group) == "without images")
    num_samples = np.cumsum([len(group.samples) for group in with_images_first])
    enough = int(np.searchsorted(num_samples, MIN_SAMPLES)) + 1
    return [_recomputed(group) for group in with_images_first[: max(num_prompts, enough)]]
