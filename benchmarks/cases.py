"""Cases of the benchmarks: model, rows, group sizes and completion lengths, the same for Fovea and TRL."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fovea.config.model import TinyModel
from fovea.models.load import DTYPES
from fovea.models.tiny import FIXED, FixedSizes, TinyParts, make_tiny, with_processor
from fovea_gym.environments.base import Environment
from fovea_gym.types import ImageRef, Message, Score, Task, Turn

Dtype = Literal["float32", "bfloat16"]
Reused = Literal["all", "images", "nothing"]
QUESTION = "Say which of the coloured shapes in the picture is closest to its upper left corner and how many there are"
WORDS = QUESTION.split()
MID = TinyModel(hidden_size=640, num_layers=10, num_heads=10, num_kv_heads=5, intermediate_size=2048, image_side_px=224)
MID_SIZES = FixedSizes(vision_hidden_size=384, vision_depth=6, vision_heads=6, patch_size_px=16, init_std=0.02)
IMAGE_HEAVY = TinyModel(
    hidden_size=512, num_layers=6, num_heads=8, num_kv_heads=4, intermediate_size=1536, image_side_px=448
)
HEAVY_SIZES = FixedSizes(vision_hidden_size=256, vision_depth=6, vision_heads=4, patch_size_px=16, init_std=0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The settings of one case, which is one row of the table."""

    model: TinyModel
    fixed: FixedSizes = FIXED
    vocabulary: int | None
    """Number of rows of the embedding; None for the size of the tokenizer."""
    image_side_px: int
    prompts: int
    samples: int
    completion_tokens: int
    images: int = 1
    """Number of images per prompt."""
    question_words: int | None = None
    """Number of words per prompt; None for a random number from 8 to 20."""
    freeze_vision: bool = False
    lora_rank: int | None = None
    same_rows: bool = False
    """True if every step repeats the first step's rows, so that a frozen tower's features come from the cache."""
    gradient_checkpointing: Literal["none", "full", "selective"] = "none"
    dtype: Dtype = "float32"
    """Dtype of the weights on both sides."""
    max_batch_tokens: int | None = None
    """Token budget of Fovea's engine; None for the default."""
    microbatch_tokens: int = 1024
    """Fovea's micro-batch size in tokens: about one group, to keep few activations in memory."""
    trl_rows_per_microbatch: int = 8
    """TRL's micro-batch size in rows, the fastest found on CPUs: larger ones cost padding and page faults."""
    reused: Reused = "all"
    """Activations of a rollout that its update reuses: as in a run, only the graphs of images, or nothing."""


_HEAVY = Case(
    model=IMAGE_HEAVY,
    fixed=HEAVY_SIZES,
    vocabulary=16_384,
    image_side_px=448,
    prompts=4,
    samples=8,
    completion_tokens=64,
)
_MID = Case(
    model=MID, fixed=MID_SIZES, vocabulary=32_768, image_side_px=224, prompts=4, samples=8, completion_tokens=128
)
CASES = {
    "tiny": Case(
        model=TinyModel(),
        vocabulary=None,
        image_side_px=48,
        prompts=32,
        samples=8,
        completion_tokens=16,
        microbatch_tokens=16_384,
        trl_rows_per_microbatch=256,
    ),
    "mid": _MID,
    "image_heavy": _HEAVY,
    "frozen": replace(_HEAVY, freeze_vision=True),
    "lora": replace(_HEAVY, freeze_vision=True, lora_rank=16),
    "frozen_cached": replace(_HEAVY, freeze_vision=True, same_rows=True),
    "many_4": replace(_HEAVY, samples=4),
    "many_8": _HEAVY,
    "many_16": replace(_HEAVY, samples=16),
    "long": replace(_MID, completion_tokens=512, microbatch_tokens=4096),
}


FAMILIES = {"many": ("many_4", "many_8", "many_16")}
"""Sets of cases, by name."""


def make_parts(case: Case, seed: int = 0) -> TinyParts:
    """Make weights, tokenizer and image processor of a case; equal arguments give equal results."""
    parts = make_tiny(case.model, [QUESTION, "\\boxed{red}"] * 20, seed, case.fixed)
    parts.network.to(DTYPES[case.dtype])  # type: ignore[arg-type]
    if case.vocabulary is None:
        return parts
    parts.network.resize_token_embeddings(case.vocabulary, mean_resizing=False)
    tokenizer = parts.processor.tokenizer
    # give each id a token, since other ids are never sampled: caches would be too fast with few distinct ids
    tokenizer.add_tokens([f"<{index}>" for index in range(len(tokenizer), case.vocabulary)])
    return with_processor(parts.network, tokenizer, parts.processor.image_processor, parts.processor.name)


def endless(parts: TinyParts) -> TinyParts:
    """Remove the stop tokens, so that all completions have the same length on both sides."""
    parts.processor.tokenizer.eos_token = None
    assert parts.network.generation_config is not None
    parts.network.generation_config.eos_token_id = None
    processor = parts.processor
    return with_processor(parts.network, processor.tokenizer, processor.image_processor, processor.name)


def make_tasks(case: Case, count: int, seed: int = 5) -> list[Task]:
    """Make `count` tasks with random images and questions."""
    rng = np.random.default_rng(seed)
    tasks = [_task(case, index, rng) for index in range(case.prompts if case.same_rows else count)]
    return list(islice(cycle(tasks), count))


def _task(case: Case, index: int, rng: np.random.Generator) -> Task:
    images = tuple(ImageRef(source=_picture(case.image_side_px, rng)) for _ in range(case.images))
    count = case.question_words or int(rng.integers(8, len(WORDS) + 1))
    return Task(id=str(index), question=" ".join(islice(cycle(WORDS), count)), answer="red", images=images)


def _picture(side: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Make a picture of coloured rectangles on noise."""
    image = rng.normal(60, 5, (side, side, 3)).clip(0, 255).astype(np.uint8)
    for _ in range(6):
        top, left = rng.integers(0, side * 3 // 4, 2)
        image[top : top + side // 6, left : left + side // 6] = rng.integers(0, 255, 3)
    return image


def reward_of(text: str) -> float:
    """A cheap reward that differs between texts: groups with equal rewards are not trained on."""
    return zlib.crc32(text.encode()) / 2**32


@dataclass(frozen=True, slots=True)
class BenchEnvironment(Environment):
    """The environment that serves a case's rows."""

    rows: Sequence[Task] = field(default_factory=list)

    def tasks(self, split: str) -> Sequence[Task]:
        return self.rows

    def prompt(self, task: Task) -> list[Message]:
        return [Message(role="user", parts=(*task.images, task.question))]

    def target(self, task: Task) -> str:
        return task.answer


class BenchGrader:
    """A grader that scores answers with `reward_of`."""

    async def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        reward = reward_of(turns[-1].text)
        return Score(reward=reward, accuracy=reward)
