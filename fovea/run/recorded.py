"""Sample records of a step: its first groups with images and turns, and the log-probs and advantage of each token."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fovea.evaluation.records import (
    AnsweredRow,
    RecordedEpisode,
    RecordedImage,
    RecordedMessage,
    TokenTrace,
    recorded_episode,
)
from fovea.metrics.tracker import TrackedSample
from fovea.report.images import png_bytes, read_image, write_image
from fovea.report.samples import write_samples
from fovea.run.context import Run
from fovea.samples import length_penalty, replace_samples
from fovea.train.base import Needs
from fovea.types import Batch, Episode, Group, PromptImage, Sample, SampledTurn, TurnTokens
from fovea_gym.types import Message

TRACKER_MAX_PIXELS = 512 * 512
"""Largest number of pixels of an image for a tracker, whose server stores it for every recorded step."""
MAX_TEXT_CHARS = 1000
"""Longest question and longest answer in a caption."""


def tracked_samples(run_dir: Path, records: Iterable[AnsweredRow]) -> Sequence[TrackedSample]:
    """The first image of each record that has images, scaled to at most TRACKER_MAX_PIXELS."""
    with_images = ((record, read_image(run_dir, record.images[0].name)) for record in records if record.images)
    return [
        TrackedSample(image=_decoded(png), caption=_caption(record)) for record, png in with_images if png is not None
    ]


def _decoded(png: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(png)).convert("RGB")
    scale = min(1.0, (TRACKER_MAX_PIXELS / (image.width * image.height)) ** 0.5)
    if scale == 1.0:
        return image
    return image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))


def _caption(record: AnsweredRow) -> str:
    """The question, the truth, and the group's first answer: the best or the worst would misrepresent the policy."""
    lines = [_cut(record.question), f"truth: {_cut(record.truth)}"]
    if len(record.images) > 1:
        lines.append(f"image 1 of {len(record.images)}")
    if rewards := [answer.reward for answer in record.answers]:
        mean = sum(rewards) / len(rewards)
        lines.append(f"reward {rewards[0]:.3g} (mean of {len(rewards)}: {mean:.3g}): {_cut(record.answers[0].text)}")
    return "\n".join(lines)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}..."


MAX_MESSAGE_CHARS, MAX_TOOL_CHARS = 50_000, 80
"""Longest text of a message and longest tool name that are recorded; a tool or a model may have written either."""
DECIMALS = 4
"""Decimals of recorded log-probs and advantages: a mismatch of engine and trainer that matters far exceeds 1e-4."""
RECORDED_GROUPS = 4
"""Number of groups recorded in a step, each with all of its answers."""
RECORDED_TOKENS = 1024
"""Number of tokens of an answer that are recorded with log-probs and advantages, about 30 bytes each."""
Samples = Mapping[str, Sample]
"""The samples of some groups, by the id of each sample's first completion."""


async def record_samples(run: Run, step: int, groups: Sequence[Group], batch: Batch) -> None:
    """Write the sample records of a step, if its number is due (`log.samples_every_steps`), before its update.

    If the run samples ahead of its policy, the mismatch of engine and trainer includes the steps between them.
    """
    settings = run.config.log
    if step > 1 and step % settings.samples_every_steps:
        return
    with run.phases("record"):
        kept = groups[:RECORDED_GROUPS]
        samples = await _scored(run, kept, batch)
        records = [_record(run, group, samples) for group in kept]
        write_samples(run.folder, step, records)
        if run.metrics.has_trackers:
            run.metrics.add_samples(tracked_samples(run.folder, records))


async def _scored(run: Run, groups: Sequence[Group], batch: Batch) -> Samples:
    """The samples of these groups with the trainer's log-probs as old log-probs, computed by a separate pass.

    The batch of the update stays unchanged: if it had old log-probs, the loss would take its ratio to them.
    """
    wanted = {episode.tokens[0].completion.id for group in groups for episode in group.episodes}
    of_groups = [each for each in (*batch.groups, *batch.left_out) if each.samples[0].completion_ids[0] in wanted]
    # only the tokens: groups that the update leaves out have no advantages, and a pass needs uniform samples
    plain = replace_samples(Batch(groups=tuple(of_groups)), _tokens_alone)
    scored = await run.policy.compute_logprobs(plain, Needs(old_logprobs=True))
    samples = (sample for group in of_groups for sample in group.samples)
    return {
        sample.completion_ids[0]: replace(sample, old_logprobs_T=now.old_logprobs_T)
        for sample, now in zip(samples, scored.samples, strict=True)
    }


def _tokens_alone(sample: Sample) -> Sample:
    return replace(
        sample,
        old_logprobs_T=None,
        reference_logprobs_T=None,
        masked_logprobs_T=None,
        values_T=None,
        returns_T=None,
        advantages_T=None,
    )


def _record(run: Run, group: Group, samples: Samples) -> AnsweredRow:
    first = group.episodes[0]
    return AnsweredRow(
        id=first.task.id,
        question=first.task.question,
        truth=first.task.answer,
        kind=first.task.kind,
        messages=_messages(run, first.turns[0].messages, group.prompt.images),
        answers=tuple(_answer(run, episode, samples) for episode in group.episodes),
    )


def _answer(run: Run, episode: Episode, samples: Samples) -> RecordedEpisode:
    """The record of an episode with its images and tokens; the overlong penalty becomes a separate reward part."""
    sample = samples.get(episode.tokens[0].completion.id)
    generated = [turn for turn in episode.turns if isinstance(turn, SampledTurn)]
    answer = recorded_episode(episode)
    penalty = length_penalty(episode, run.config.algorithm, run.config.rollout.max_new_tokens)
    turns = zip(answer.turns, generated, _places(episode.tokens), strict=True)
    return replace(
        answer,
        parts={**answer.parts, "algorithm.overlong": penalty} if penalty else answer.parts,
        turns=tuple(
            replace(
                recorded,
                messages=_messages(run, turn.messages, turn.tokens.observation.images) if number else (),
                tokens=None if sample is None else _trace(run, sample, place),
                version=turn.tokens.completion.version,
                seconds=round(turn.seconds, DECIMALS),
            )
            for number, (recorded, turn, place) in enumerate(turns)
        ),
    )


def _places(turns: Sequence[TurnTokens]) -> Iterator[slice]:
    """Yield the slice of each turn's completion in the tokens of its sample."""
    end = 0
    for number, turn in enumerate(turns):
        start = end + (turn.observation.num_tokens if number else 0)
        end = start + len(turn.completion.token_ids_T)
        yield slice(start, end)


def _trace(run: Run, sample: Sample, place: slice) -> TokenTrace:
    place = slice(place.start, min(place.stop, place.start + RECORDED_TOKENS))
    return TokenTrace(
        pieces=tuple(run.token_text(int(index)) for index in sample.token_ids_T[place]),
        engine_logprobs=() if sample.is_noisy else _rounded(sample.rollout_logprobs_T[place]),
        trainer_logprobs=() if sample.old_logprobs_T is None else _rounded(sample.old_logprobs_T[place]),
        advantages=() if sample.advantages_T is None else _rounded(sample.advantages_T[place]),
    )


def _rounded(values_T: NDArray[np.float32]) -> tuple[float, ...]:
    return tuple(np.round(values_T.astype(np.float64), DECIMALS).tolist())


def _messages(run: Run, messages: Sequence[Message], seen: Sequence[PromptImage]) -> tuple[RecordedMessage, ...]:
    """Record the messages, and write their images to the run folder; `seen` holds the images as the model saw them."""
    frames = iter(map(run.box_frame, seen))
    return tuple(
        RecordedMessage(
            role=message.role,
            parts=tuple(
                _bounded(part)
                if isinstance(part, str)
                else RecordedImage(
                    name=write_image(run.folder, png_bytes(run.open_image(part))), frame=next(frames, None)
                )
                for part in message.parts
            ),
            tool=message.tool[:MAX_TOOL_CHARS],
            failed=message.failed,
        )
        for message in messages
    )


def _bounded(text: str) -> str:
    rest = len(text) - MAX_MESSAGE_CHARS
    return text if rest <= 0 else f"{text[:MAX_MESSAGE_CHARS]}... ({rest:,} more characters)"
