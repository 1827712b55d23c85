"""Known faults of engines, imitated in the samples that the trainer scores: their images, positions and image tokens.

Engines and trainers have been released with each of these faults, and none of them raises an error. Stale weights, from
before a weight sync, cannot be imitated in a batch. But the policy has scored the completions that the engine sampled
with them (`TakenSync`), and a request with the same seed samples the same tokens from the same weights.

Axes: `A` action tokens of a group or a sample, `L` token ids of a text, `K` token ids that a fault keeps or repeats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fovea.data.bad_rows import with_skip
from fovea.data.prompt_source import PromptedTask, PromptSource
from fovea.types import Prompt, PromptImage, Sample, SampleGroup
from fovea_gym.environments.base import Environment
from fovea_gym.errors import DataError
from fovea_gym.types import ImageRef, Message

PromptKind = Literal["with images", "without images"]
MAX_ROWS_TRIED = 1000
"""Training rows that are tried before giving up."""


def usable_prompts(
    source: PromptSource,
    environment: Environment,
    num_rows: int,
    *,
    max_seconds: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[tuple[PromptKind, PromptedTask]]:
    """Find the first `num_rows` usable training rows; returns their prompts with and without images.

    `say` gets a line for every row that cannot be used. Returns the rows found within `max_seconds`; DataError if there
    is none.
    """
    prompts = list[tuple[PromptKind, PromptedTask]]()
    rows, tried, end, last_error = 0, 0, clock() + max_seconds, None
    while rows < num_rows and tried < min(len(source), MAX_ROWS_TRIED) and (tried == 0 or clock() < end):
        try:
            task = source.tasks[tried]
            whole, bare = source.render(task), source.render(task, without_images(environment.prompt(task)))
        except DataError as error:
            # not reported as a bad row here: the run does that when its data order reaches the row
            last_error = with_skip(error)
            say(f"parity gate: found {rows} of {num_rows} usable rows among {tried + 1} tried; {error}")
        else:
            # later turns may have images too
            prompts += [("with images", whole)] if whole.prompt.images or environment.max_turns > 1 else []
            prompts.append(("without images", bare))
            rows += 1
        tried += 1
    if not prompts:
        within = f" within {max_seconds:g} s" if clock() >= end else ""
        raise DataError(f"none of the first {tried} training rows can be used{within}; the last error: {last_error}")
    return prompts


def without_images(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages without their images."""
    return tuple(
        replace(message, parts=tuple(part for part in message.parts if not isinstance(part, ImageRef)))
        for message in messages
    )


Ids: TypeAlias = NDArray[np.int64]
Pixels: TypeAlias = NDArray[Any]
Images: TypeAlias = tuple[PromptImage, ...]
Fault: TypeAlias = Callable[[SampleGroup], SampleGroup]
ImageFault: TypeAlias = Callable[[PromptImage], PromptImage]
TextFault: TypeAlias = Callable[[Ids, Images], tuple[Ids, Images]]
"""Maps a text and its images to the index [K] of the tokens that the fault keeps, and to the images with the fault."""
PIXEL_MEAN = PIXEL_STD = 0.5
"""Normalisation of Qwen3-VL's image processor; other families use similar values."""
GREY = 1e-30
"""Normalised value of a grey pixel: too small for norms to blow up, but not 0, which means padding in Idefics 3."""


def faulty_groups(
    groups: Sequence[SampleGroup], image_token_id: int, *, packed: bool = True
) -> Iterator[tuple[str, int, SampleGroup]]:
    """Yield every group that a fault changes: the fault's name, the group's index, and the group with the fault.

    `packed`: the trainer packs rows and computes their positions; transformers and Megatron compute positions that need
    the start and end tokens around each image.
    """
    for name, fault in _faults(groups, image_token_id, packed=packed).items():
        for index, group in enumerate(groups):
            changed = fault(group)
            if [image.key for image in changed.images] != [image.key for image in group.images]:
                yield name, index, changed


def _faults(groups: Sequence[SampleGroup], image_token_id: int, *, packed: bool) -> dict[str, Fault]:
    """Every fault by its name; a fault leaves groups to which it does not apply unchanged."""
    in_prompts = [image for group in groups for image in group.prompt.images]
    in_later_turns = [image for group in groups for sample in group.samples for image in sample.images]
    before = _images_before(in_later_turns) | _images_before(in_prompts)

    def of_another(image: PromptImage) -> PromptImage:
        other = before.get(image.key, image)
        if other.key == image.key:
            return image
        return _with_pixels(image, lambda name, x: np.resize(other.tensors[name], x.shape))

    def doubled(ids_L: Ids, images: Images) -> tuple[Ids, Images]:
        is_pad_L = ids_L == image_token_id
        index_K = np.repeat(np.arange(len(ids_L)), 1 + is_pad_L) if packed else _doubled_spans(is_pad_L)
        return index_K, tuple(image for image in images for _ in range(2))

    def last_missing(ids_L: Ids, images: Images) -> tuple[Ids, Images]:
        pads = np.flatnonzero(ids_L == image_token_id)
        num_missing = sum(image.num_tokens for image in images[-1:])
        return np.delete(np.arange(len(ids_L)), pads[len(pads) - num_missing :]), images[:-1]

    of_images: dict[str, ImageFault] = {
        "grey images": lambda image: _with_pixels(image, lambda _, x: np.full_like(x, GREY)),
        "images of other prompts": of_another,
        "images normalised twice": lambda image: _with_pixels(image, lambda _, x: (x - PIXEL_MEAN) / PIXEL_STD),
        "images of half the resolution": lambda image: _with_pixels(image, _halved),
        "two of three M-RoPE rows dropped": lambda image: replace(image, positions="time"),
        "1-D positions": lambda image: replace(image, positions="sequence"),
    }
    return {
        **{name: partial(_in_images, name, fault) for name, fault in of_images.items()},
        "image tokens doubled": lambda group: _in_samples(doubled, _in_prompt(doubled, group)),
        "the last image missing": partial(_in_prompt, last_missing),
        "a later turn's image missing": partial(_in_samples, last_missing),
    }


def _in_images(name: str, fault: ImageFault, group: SampleGroup) -> SampleGroup:
    def all_of(images: Images) -> Images:
        # a new key, since features are cached and pixels are sent to other processes by key
        changed = [(image, fault(image)) for image in images]
        return tuple(old if new is old else replace(new, key=f"{old.key}, {name}") for old, new in changed)

    prompt = replace(group.prompt, images=all_of(group.prompt.images))
    samples = tuple(replace(sample, images=all_of(sample.images)) for sample in group.samples)
    return replace(group, prompt=prompt, samples=samples)


def _in_prompt(fault: TextFault, group: SampleGroup) -> SampleGroup:
    index_K, images = fault(group.prompt.token_ids_L, group.prompt.images)
    return replace(group, prompt=replace(group.prompt, token_ids_L=group.prompt.token_ids_L[index_K], images=images))


def _in_samples(fault: TextFault, group: SampleGroup) -> SampleGroup:
    def changed(sample: Sample) -> Sample:
        index_K, images = fault(sample.token_ids_T, sample.images)
        return replace(
            sample,
            token_ids_T=sample.token_ids_T[index_K],
            mask_T=sample.mask_T[index_K],
            rollout_logprobs_T=sample.rollout_logprobs_T[index_K],
            images=images,
        )

    return replace(group, samples=tuple(map(changed, group.samples)))


def _with_pixels(image: PromptImage, change: Callable[[str, Pixels], Pixels]) -> PromptImage:
    tensors = {name: change(name, x) if x.dtype.kind == "f" else x for name, x in image.tensors.items()}
    return replace(image, tensors=tensors)


def _halved(_: str, x: Pixels) -> Pixels:
    """Replace each pair of neighbouring pixels in a row by its mean; the width is the last axis."""
    halved: Pixels = x.reshape(*x.shape[:-1], -1, 2).mean(axis=-1).repeat(2, axis=-1)
    return halved


def as_new(prompt: Prompt, version: int) -> Prompt:
    """The prompt with images that no cache knows, by key or by pixels: one value is moved by `1 + version` ulps."""

    def nudged(_: str, x: Pixels) -> Pixels:
        changed = x.copy()
        changed.flat[0] += (1 + version) * np.spacing(changed.flat[0])
        return changed

    images = (replace(_with_pixels(image, nudged), key=f"{image.key}, new {version}") for image in prompt.images)
    return replace(prompt, images=tuple(images))


def _images_before(images: Sequence[PromptImage]) -> dict[str, PromptImage]:
    """Map the key of each distinct image to the image before it, and the first one to the last."""
    distinct = list({image.key: image for image in images}.values())
    return {image.key: distinct[index - 1] for index, image in enumerate(distinct)}


def _doubled_spans(is_pad_L: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Index [K] that repeats every run of image tokens with the start and end tokens on both sides of it."""
    edges = np.flatnonzero(np.diff(is_pad_L.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    parts, done = [], 0
    for begin, end in edges:
        parts += [np.arange(done, end + 1), np.arange(begin - 1, end + 1)]
        done = end + 1
    return np.concatenate([*parts, np.arange(done, len(is_pad_L))])


Array: TypeAlias = NDArray[np.float32]
Columns: TypeAlias = tuple[Array, Array, Array]
"""Log-probs [A] of the same tokens: by the engine, by the trainer, and by a trainer with a fault."""


@dataclass(slots=True)
class TakenSync:
    """Completions sampled after the last checked weight sync, with the policy's log-probs of their tokens."""

    prompts: Sequence[tuple[PromptKind, PromptedTask]] = ()
    """Prompts to sample from after each weight sync; empty before the parity gate, and without one."""
    version: int = 0
    _tokens: list[tuple[NDArray[np.int64], Array]] = field(default_factory=list)
    """Token ids [A] and log-probs [A] of each sample's actions."""

    def remember(self, version: int, groups: Sequence[SampleGroup], sound: Sequence[Array]) -> None:
        """Remember this weight sync as the last one that the engine took; `sound` holds the policy's log-probs [A]."""
        self.version = version
        self._tokens = list(_by_sample(groups, sound))

    def beside(self, groups: Sequence[SampleGroup], sound: Sequence[Array]) -> list[Columns]:
        """Log-probs after a later weight sync and after the remembered one, for the tokens sampled both times."""
        engine = [engine_logprobs(group) for group in groups]
        after = zip(_by_sample(groups, engine), _by_sample(groups, sound), strict=True)
        columns = list[Columns]()
        for (before_A, stale_A), ((ids_A, engine_A), (_, sound_A)) in zip(self._tokens, after, strict=True):
            # length of the common prefix of the two lists of token ids
            length = min(len(before_A), len(ids_A))
            same = int(np.argmin([*(before_A[:length] == ids_A[:length]), False]))
            columns += [(engine_A[:same], sound_A[:same], stale_A[:same])] if same else []
        return columns


def engine_logprobs(group: SampleGroup) -> Array:
    """The engine's log-probs [A] of a group."""
    return np.concatenate([sample.rollout_logprobs_T[sample.mask_T] for sample in group.samples])


def _by_sample(groups: Sequence[SampleGroup], values: Sequence[Array]) -> Iterator[tuple[NDArray[np.int64], Array]]:
    """Token ids [A] and values [A] of each sample's actions."""
    for group, values_A in zip(groups, values, strict=True):
        ends = np.cumsum([sample.num_actions for sample in group.samples])
        for sample, of_sample_A in zip(group.samples, np.split(values_A, ends[:-1]), strict=True):
            yield sample.token_ids_T[sample.mask_T], of_sample_A
