"""`fovea saliency`: the occlusion map of one answer, as a picture and as numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fovea.commands.evaluate import EvalSet, Say, engine_settings, renderer_of, source_of
from fovea.commands.targets import Baseline, OpenedModel, ServerTarget, open_model, parse_target, shared_settings
from fovea.config.recipes import Override
from fovea.environments.base import Split
from fovea.environments.prompt_source import PromptedTask, PromptSource
from fovea.errors import ConfigError
from fovea.evaluation.occlusion import MOST_PATCHES, OcclusionMap, Patch, answer_logprobs, patches
from fovea.run.rollout_step import rollout_sampling
from fovea.types import ImageRef, PixelChange, Request
from fovea.utils.event_loop import wait_for
from fovea.wiring.engine import make_embedded

PATCHES_PER_SIDE = 16
"""Patches along the longer side, unless their size is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The answer whose map is asked for."""

    row: int
    image: int = 1
    """Number of the picture in the prompt."""
    patch_px: int | None = None
    answer: str | None = None
    """None: the model's greedy answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saliency:
    """A map, and what it is of."""

    task_id: str
    question: str
    answer: str
    map: OcclusionMap
    picture: Image.Image

    def write(self, file: Path) -> None:
        """Write the lit picture, and the numbers beside it as JSON."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self.map.over(self.picture).save(file)
        numbers = {
            "id": self.task_id,
            "question": self.question,
            "answer": self.answer,
            "logprob": self.map.logprob,
            "patch_px": self.map.side_px,
            "falls": [[round(float(fall), 6) for fall in falls_C] for falls_C in self.map.falls_RC],
        }
        file.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def saliency_of(
    word: str,
    asked: Asked,
    overrides: Sequence[Override],
    say: Say,
    *,
    recipe: Path | None,
    split: Split,
    trust: bool = False,
) -> Saliency:
    """The occlusion map of a target's answer to a row."""
    target = parse_target(word)
    if isinstance(target, Baseline | ServerTarget):
        raise ConfigError(f"{word} has no picture to hide parts of here; name a run, a checkpoint or a model folder")
    eval_set = EvalSet.of(shared_settings([target], recipe, overrides, trust=trust), split)
    with closing(eval_set.grading):
        if not 0 <= asked.row < len(eval_set.tasks):
            raise ConfigError(f"--row {asked.row}: the {split} split has rows 0 to {len(eval_set.tasks) - 1}")
        say("loading the model")
        model = open_model(target, eval_set.config, overrides, trust=trust)
        source = source_of(eval_set, renderer_of(eval_set, model))
        item = source.render(eval_set.tasks[asked.row])
        answer_T = _answer(asked, item, model, eval_set)
        picture = _picture(asked, item, eval_set)
        grid = _grid(asked, picture.size)
        say(f"{sum(map(len, grid))} patches of {grid[0][0].side} px")
        return Saliency(
            task_id=item.task.id,
            question=item.task.question,
            answer=str(model.processor.tokenizer.decode(answer_T, skip_special_tokens=True)),
            map=_map(asked, item, answer_T, grid, source, model),
            picture=picture,
        )


def _answer(asked: Asked, item: PromptedTask, model: OpenedModel, eval_set: EvalSet) -> NDArray[np.int64]:
    """Token ids of the given text, or of the model's greedy completion."""
    if asked.answer is not None:
        ids = model.processor.tokenizer(asked.answer, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ConfigError("--answer: it has no token; give a text, or leave it out for the model's answer")
        return np.array(ids, dtype=np.int64)
    engine = make_embedded(engine_settings(eval_set.config), model.processor, model.vlm)
    engine.load_weights(dict(engine.own_weights()), 0)
    sampling = replace(rollout_sampling(eval_set.config, eval_set.environment), temperature=0.0)

    async def drawn() -> NDArray[np.int64]:
        try:
            (completion,) = await engine.generate(Request(id="saliency", prompt=item.prompt, sampling=sampling))
            return completion.token_ids_T
        finally:
            await engine.close()

    return wait_for(drawn())


def _refs(item: PromptedTask, eval_set: EvalSet) -> list[ImageRef]:
    messages = eval_set.environment.prompt(item.task)
    return [part for message in messages for part in message.parts if isinstance(part, ImageRef)]


def _picture(asked: Asked, item: PromptedTask, eval_set: EvalSet) -> Image.Image:
    refs = _refs(item, eval_set)
    if not 1 <= asked.image <= len(refs):
        raise ConfigError(f"--image {asked.image}: the prompt of {item.task.id} has {len(refs)} picture(s)")
    return eval_set.open_image(refs[asked.image - 1])


def _grid(asked: Asked, size: tuple[int, int]) -> list[list[Patch]]:
    side_px = asked.patch_px or -(-max(size) // PATCHES_PER_SIDE)
    grid = patches(size, side_px)
    if (number := sum(map(len, grid))) > MOST_PATCHES:
        raise ConfigError(
            f"--patch-px {side_px}: a picture of {size[0]} x {size[1]} px has {number} patches, above the limit of "
            f"{MOST_PATCHES}; set a larger one"
        )
    return grid


def _map(
    asked: Asked,
    item: PromptedTask,
    answer_T: NDArray[np.int64],
    grid: list[list[Patch]],
    source: PromptSource,
    model: OpenedModel,
) -> OcclusionMap:
    train, temperature = model.config.train, model.config.rollout.temperature
    # one after the other: the processed pictures of all patches together may take more memory than there is
    views = (source.view(item, _only(asked.image, patch))() for row in grid for patch in row)
    whole, *hidden = answer_logprobs(
        model.vlm,
        chain([item.prompt], views),
        answer_T,
        max_tokens=train.max_tokens_per_microbatch,
        temperature=temperature,
    )
    falls_RC = (whole - np.array(hidden, np.float32)).reshape(len(grid), -1)
    return OcclusionMap(logprob=whole, falls_RC=falls_RC, side_px=grid[0][0].side)


def _only(image: int, patch: Patch) -> Callable[[int], PixelChange]:
    """The changes of a prompt's pictures, counted from 0: the patch for one, none for the others."""
    return lambda number: patch if number == image - 1 else _unchanged


def _unchanged(pixels_YXC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return pixels_YXC
