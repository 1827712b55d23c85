"""Blind trainings of other systems (docs/blind.md), each made in a real engine: the run stops and says why."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.parity_faults import CHANGES, POSITIONS, BrokenEngine, broken_positions
from fovea import loop, loop_async
from fovea.errors import EngineError, ParityError
from fovea.metrics.log import read_metrics
from fovea.models.modules import vision_tower
from fovea.models.vision.feature_cache import ImageFeatures
from fovea.models.vlm import VLM
from fovea.rollout.outputs import Drawn, Sampled, completions
from fovea.types import Completion, Prompt, PromptImage, Request
from tests.run.test_parity_pushes import SETTINGS, copying_run
from tests.wiring.small import run_of

Change = Callable[[Prompt, bool], Prompt]
TAG = [5, 6, 7]
"""An image's tag as plain text."""


def as_text(pad: int) -> Change:
    """The tag of an image read as words, as where text is sent in place of token ids."""

    def change(prompt: Prompt, _: bool) -> Prompt:
        if not prompt.images:
            return prompt
        pads = np.flatnonzero(prompt.token_ids_L == pad)
        ids_L = np.insert(np.delete(prompt.token_ids_L, pads), pads[0], TAG)
        return replace(prompt, token_ids_L=ids_L, images=())

    return change


def cut(pad: int) -> Change:
    """The upper two rows of patches of each image only."""

    def change(prompt: Prompt, _: bool) -> Prompt:
        images = []
        for image in prompt.images:
            frames, _, width = image.grid
            pixels = image.tensors["pixel_values"][: frames * 2 * width]
            tensors = {"pixel_values": pixels, "image_grid_thw": np.array([frames, 2, width])}
            grid, num_tokens = (frames, 2, width), len(pixels) // 4
            images.append(replace(image, key=f"{image.key}-cut", tensors=tensors, grid=grid, num_tokens=num_tokens))
        left_out = np.flatnonzero(prompt.token_ids_L == pad)[sum(image.num_tokens for image in images) :]
        return replace(prompt, token_ids_L=np.delete(prompt.token_ids_L, left_out), images=tuple(images))

    return change


def empty_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose vision tower has the weights that it was made with, and none of the checkpoint's."""
    own, made = VLM.rollout_features, list[VLM]()

    def features(vlm: VLM, images: Sequence[PromptImage]) -> list[ImageFeatures]:
        if not made:
            made.append(copy.deepcopy(vlm))
            torch.manual_seed(0)
            for weight in vision_tower(made[0].network).parameters():
                torch.nn.init.normal_(weight, std=0.02)
        return own(made[0], images)

    monkeypatch.setattr(VLM, "rollout_features", features)


def whole(_: int) -> Change:
    return lambda prompt, _: prompt


BREAKS: dict[str, tuple[Callable[[int], Change], str]] = {
    "image tokens doubled": (CHANGES["image tokens doubled"], "seems to have this fault: image tokens doubled"),
    "two of three M-RoPE rows dropped": (whole, "seems to have this fault: two of three M-RoPE rows dropped"),
    "images not sent": (CHANGES["the last image missing"], "seems to have this fault: the last image missing"),
    "text in place of ids": (as_text, "the nearest is: the last image missing .*does the engine get them"),
    "vision tower not loaded": (whole, "has it loaded the weights of the vision tower"),
    "half the resolution": (CHANGES["images of half the resolution"], "images of half the resolution"),
    "other size": (cut, "does it resize them as the trainer"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_blind_engine_stops_the_run_before_its_first_update(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, cause = BREAKS[name]
    run = run_of(tmp_path, **SETTINGS)
    engine = BrokenEngine(run.engine, change(run.image_token_id))
    if name == "vision tower not loaded":
        empty_tower(monkeypatch)
    with (
        broken_positions(engine, POSITIONS[name]) if name in POSITIONS else nullcontext(),
        pytest.raises(ParityError, match=f"^tiny qwen3_vl: on prompts with images.*{cause}"),
    ):
        loop.train(replace(run, engine=engine))
    assert not read_metrics(tmp_path)


class Reporting(BrokenEngine):
    """A broken engine that says which prompt it has read, as vLLM, SGLang and servers do."""

    async def generate(self, request: Request) -> Sequence[Completion]:
        drawn = {
            place: Sampled(token_ids=each.token_ids_T, logprobs=each.logprobs_T, finish_reason=each.finish)  # type: ignore[arg-type]
            for place, each in enumerate(await super().generate(request))
        }
        prompt_ids_L = self._change(request.prompt, False).token_ids_L.tolist()
        return completions(request, Drawn(prompt_ids_L=prompt_ids_L, completions=drawn), self._text, version=0)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (CHANGES["image tokens doubled"], "expands image tokens that are expanded already"),
        (CHANGES["the last image missing"], "the images do not reach it"),
        (as_text, "text in place of token ids"),
        (cut, "resizes images differently"),
    ],
)
def test_an_engine_that_reports_another_prompt_stops_the_run_at_its_first_request(
    change: Callable[[int], Change], cause: str, tmp_path: Path
) -> None:
    run = run_of(tmp_path, **SETTINGS)
    with pytest.raises(EngineError, match=rf"the engine has read a prompt of \d+ tokens, .*{cause}"):
        loop.train(replace(run, engine=Reporting(run.engine, change(run.image_token_id))))
    assert not read_metrics(tmp_path)


def test_images_that_only_rollouts_ahead_lose_stop_the_run_at_that_step(tmp_path: Path) -> None:
    algorithm = {"entropy_coef": 0.01, "max_groups_without_signal": 2, "old_logprobs": "engine"}
    run = copying_run(tmp_path, algorithm=algorithm)
    # past the check that it has processes of its own, which its copies stand for
    rollout = run.config.rollout.model_copy(update={"max_staleness_steps": 1})
    engine, lose = run.engine, CHANGES["the last image missing"](run.image_token_id)

    class Forgetful(BrokenEngine):
        async def generate(self, request: Request) -> Sequence[Completion]:
            is_late = request.for_update and request.id.split("/")[1] not in ("parity", "0")
            return await (super() if is_late else engine).generate(request)

    late = replace(run, engine=Forgetful(engine, lose), config=run.config.model_copy(update={"rollout": rollout}))
    with pytest.raises(
        ParityError, match=r"step 2: .*by 0\.\d+ on average, and 0.2 is allowed .*the last image missing"
    ):
        loop_async.train(late)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


def test_features_kept_over_a_push_stop_the_run_at_that_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, kept = VLM.rollout_features, dict[str, ImageFeatures]()

    def features(vlm: VLM, images: Sequence[PromptImage]) -> list[ImageFeatures]:
        new = [image for image in images if image.key not in kept]
        kept.update(zip([image.key for image in new], own(vlm, new) if new else [], strict=True))
        return [kept[image.key] for image in images]

    monkeypatch.setattr(VLM, "rollout_features", features)
    with pytest.raises(
        ParityError, match=r"after the push of version 1, .*keeps features of images from older weights"
    ):
        loop.train(copying_run(tmp_path))
    assert not read_metrics(tmp_path)
