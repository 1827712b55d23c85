"""Blind trainings of other systems (docs/blind.md), each made in a real engine: the run stops and says why."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.parity_faults import CHANGES, POSITIONS, BrokenEngine, broken_positions
from fovea import loop
from fovea.errors import EngineError, ParityError
from fovea.metrics.log import read_metrics
from fovea.models.modules import vision_tower
from fovea.models.vision.feature_cache import ImageFeatures
from fovea.models.vlm import VLM
from fovea.rollout.base import Engine
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.rollout.outputs import EngineOutput, Sampled, completions
from fovea.run.context import RolloutMismatch, Run
from fovea.run.parity_faults import TakenSync
from fovea.train.local import LocalPolicy
from fovea.types import Completion, Prompt, PromptImage, Request, SampleGroup, Shape
from fovea.weights.sync import WeightSender
from tests.records import sample_of, text_prompt
from tests.runs import untimed
from tests.wiring.small import run_of

SETTINGS: dict[str, object] = {
    "max_steps": 3,
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 12, "engine": {"reuse_gib": 0}},
    # with a bonus for entropy every group trains
    "algorithm": {"entropy_coef": 0.01, "max_groups_without_signal": 2},
    "train": {"learning_rate": 3e-3},
    "evaluate": {"image_controls": False, "test_size": 2, "dev_size": 2},
}


@dataclass
class Copying:
    """A sink that copies all weights, and says so of weight syncs that it loses too."""

    engine: EmbeddedEngine
    lost_from: int
    has_weights = False

    def begin_sync(self, shapes: Mapping[str, Shape]) -> None:
        self.copies: dict[str, Tensor] = {}

    def receive_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self.copies |= {name: weight.clone() for name, weight in bucket}

    def finish_sync(self, version: int) -> None:
        if version < self.lost_from:
            self.engine.load_weights(self.copies, version)


def copying_run(folder: Path, *, lost_from: int = 99, **settings: object) -> Run:
    run = run_of(folder, **SETTINGS | settings)
    assert isinstance(run.engine, EmbeddedEngine)
    assert isinstance(run.policy, LocalPolicy)
    sink = Copying(run.engine, lost_from)
    return replace(run, weight_sync=WeightSender(run.policy.trained.weights_to_sync, [sink]))


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
            grid = (image.grid[0], 2, image.grid[2])
            pixels = image.tensors["pixel_values"][: grid[0] * 2 * grid[2]]
            tensors = {"pixel_values": pixels, "image_grid_thw": np.array(grid)}
            key, num_tokens = f"{image.key}-cut", len(pixels) // 4
            images.append(replace(image, key=key, tensors=tensors, grid=grid, num_tokens=num_tokens))
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
    "text in place of ids": (as_text, "the nearest is: the last image missing .*Does the engine receive the"),
    "vision tower not loaded": (whole, "has it loaded the weights of the vision tower"),
    "half the resolution": (CHANGES["images of half the resolution"], "images of half the resolution"),
    "other size": (cut, "does it resize images as the trainer"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_blind_engine_stops_the_run_at_its_start(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        return completions(request, EngineOutput(prompt_ids_L=prompt_ids_L, completions=drawn), self._text, version=0)


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
    with pytest.raises(EngineError, match=rf"the engine's prompt has \d+ tokens, .*{cause}"):
        loop.train(replace(run, engine=Reporting(run.engine, change(run.image_token_id))))
    assert not read_metrics(tmp_path)


def test_a_run_with_copies_is_checked_at_each_weight_sync_and_left_as_it_is(tmp_path: Path) -> None:
    shared, copied = tmp_path / "shared", tmp_path / "copied"
    loop.train(run_of(shared, **SETTINGS))
    run = copying_run(copied)
    loop.train(run)
    assert run.taken_sync.version == 3, "each weight sync was told from the one before"
    assert [{"seconds/parity" in row for row in read_metrics(f)} for f in (shared, copied)] == [{False}, {True}]
    about_syncs = {"transfer/weights_mib", "weights_checksum"}
    rows = [[{k: v for k, v in row.items() if k not in about_syncs} for row in untimed(f)] for f in (shared, copied)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("lost_from", [1, 2])
def test_a_weight_sync_that_the_engine_lost_is_named(lost_from: int, tmp_path: Path) -> None:
    named = rf"the weight sync of version {lost_from}, .*this fault: the weights of version {lost_from - 1} \("
    with pytest.raises(ParityError, match=rf"(?s)after {named}"):
        loop.train(copying_run(tmp_path, lost_from=lost_from))


def group_of(*drawn: tuple[list[int], list[float]]) -> SampleGroup:
    samples = [sample_of(ids, rollout_logprobs_T=np.float32(logprobs)) for ids, logprobs in drawn]
    return SampleGroup(prompt=text_prompt([1]), samples=tuple(samples))


def test_tokens_are_compared_as_far_as_both_draws_are_equal() -> None:
    sync = TakenSync()
    sync.remember(7, [group_of(([1, 2, 3], [0, 0, 0]), ([4], [0]))], [np.float32([-1, -2, -3, -4])])
    later = group_of(([1, 2, 9, 9], [-0.1, -0.2, -0.3, -0.4]), ([5, 6], [-0.5, -0.6]))
    ((engine_A, sound_A, stale_A),) = sync.beside([later], [np.float32([-11, -12, -13, -14, -15, -16])])
    assert engine_A.tolist() == pytest.approx([-0.1, -0.2])
    assert (sound_A.tolist(), stale_A.tolist()) == ([-11, -12], [-1, -2])


def one_step_behind(run: Run) -> Run:
    """The run with rollouts ahead, past the check that its engine has a process, which its copies stand for."""
    rollout = run.config.rollout.model_copy(update={"max_staleness_steps": 1})
    return replace(run, config=run.config.model_copy(update={"rollout": rollout}))


OF_THE_ENGINE = {"entropy_coef": 0.01, "max_groups_without_signal": 2, "old_logprobs": "engine"}


def test_images_that_only_rollouts_ahead_lose_stop_the_run_at_that_step(tmp_path: Path) -> None:
    run = one_step_behind(copying_run(tmp_path, algorithm=OF_THE_ENGINE))
    engine, lose = run.engine, CHANGES["the last image missing"](run.image_token_id)

    class Forgetful(BrokenEngine):
        async def generate(self, request: Request) -> Sequence[Completion]:
            is_late = request.for_update and request.id.split("/")[1] not in ("parity", "0")
            return await (super() if is_late else engine).generate(request)

    differ = r"step 2: .*by 0\.\d+ on average, and 0.2 is allowed .*the last image missing"
    with pytest.raises(ParityError, match=differ):
        loop.train(replace(run, engine=Forgetful(engine, lose)))
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


def test_features_kept_over_a_weight_sync_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, kept = VLM.rollout_features, dict[str, ImageFeatures]()

    def features(vlm: VLM, images: Sequence[PromptImage]) -> list[ImageFeatures]:
        new = [image for image in images if image.key not in kept]
        kept.update(zip([image.key for image in new], own(vlm, new) if new else [], strict=True))
        return [kept[image.key] for image in images]

    monkeypatch.setattr(VLM, "rollout_features", features)
    with pytest.raises(ParityError, match=r"after the weight sync of version 1, .*still uses image features of older"):
        loop.train(copying_run(tmp_path))
    assert not read_metrics(tmp_path)


def test_log_probs_that_training_has_moved_are_no_fault(tmp_path: Path) -> None:
    """Weights one step old, at a high learning rate: the run warns and goes on."""
    run = copying_run(tmp_path, algorithm=OF_THE_ENGINE, train={"learning_rate": 2e-2})
    loop.train(one_step_behind(run))
    mismatches = [row["mismatch_trained/abs"] for row in read_metrics(tmp_path)]
    assert max(mismatches) > 0.2, "beyond the limit of two versions"
    assert "No known fault explains it" in (tmp_path / "console.txt").read_text()
    assert len(mismatches) == 3


def test_a_difference_that_no_fault_explains_is_looked_at_again_when_it_has_doubled() -> None:
    mismatch = RolloutMismatch()
    assert [mismatch.allowed(0.1, staleness=staleness) for staleness in (0, 1)] == pytest.approx([0.1, 0.2])
    mismatch.explained(0.3, staleness=1)
    assert [mismatch.allowed(0.1, staleness=staleness) for staleness in (0, 1)] == pytest.approx([0.3, 0.6])
    mismatch.explained(0.1, staleness=0)
    assert mismatch.allowed(0.1, staleness=0) == pytest.approx(0.3)


@dataclass
class Noisy:
    """An engine whose log-probs are off by so much after the first step, this way and that."""

    run: Run
    mismatch: float

    def __getattr__(self, name: str) -> object:
        return getattr(self.run.engine, name)

    async def generate(self, request: Request) -> Sequence[Completion]:
        drawn = await self.run.engine.generate(request)
        if request.id.split("/")[1] in ("parity", "0"):
            return drawn
        noise = np.float32([-self.mismatch, self.mismatch])
        return [replace(each, logprobs_T=each.logprobs_T + np.resize(noise, len(each.logprobs_T))) for each in drawn]


@pytest.mark.parametrize(("mismatch", "is_stopped"), [(0.15, False), (0.6, True)])
def test_inexact_log_probs_stop_a_run_far_beyond_the_limit(mismatch: float, is_stopped: bool, tmp_path: Path) -> None:
    run = run_of(tmp_path, **SETTINGS)
    noisy = replace(run, engine=cast("Engine", Noisy(run, mismatch)))
    with pytest.raises(ParityError, match=r"step 2: .*by 0\.6") if is_stopped else nullcontext():
        loop.train(noisy)
    assert len(read_metrics(tmp_path)) == (1 if is_stopped else 3)
    assert ("The run continues" in (tmp_path / "console.txt").read_text()) != is_stopped
