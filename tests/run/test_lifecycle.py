"""What happens around the steps: the warm-up, which rows are read when, and what becomes of the readings."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL.Image import Image

from fovea.config.sections import Warmup
from fovea.data.order import Order
from fovea.data.prompt_source import PromptSource
from fovea.errors import TrainError
from fovea.loop import train
from fovea.models.tiny import TinyParts
from fovea.models.vlm import VLM
from fovea.report.held_out import read_pictures
from fovea.run.context import Run
from fovea.run.held_out import read_dev, sample_dev
from fovea.run.lifecycle import begin, finish, save_last
from fovea.run.sampling import evaluation_sampling, rollout_sampling
from fovea.run.state import TrainState
from fovea.run.unscored import record_unscored_answer
from fovea.run.warmup import WarmupStage, enough, warm_up
from fovea.train.base import SftExample
from fovea.train.sft import SupervisedTrainer
from fovea.train.torch.policy import supervised_trainer
from fovea.types import Batch, Evaluation, Metrics
from fovea_gym.errors import BadRowError
from fovea_gym.types import ImageRef
from fovea_gym.utils.event_loop import wait_for
from gym_tests.bandit import ANSWERS, BanditEnvironment
from gym_tests.tables import table
from tests.environments.prompt_sources import make_source
from tests.fakes import BanditPolicy, bandit_run, printed_in
from tests.reference import reference_logprobs
from tests.tiny_models import FAMILIES, mixed_prompts, renderer, tiny
from tests.wiring.small import run_of


def of(accuracy: float) -> Evaluation:
    return Evaluation(accuracies={"all": (accuracy,)})


def begun(run: Run) -> TrainState:
    """The state before the first step of a run, whose checkpoint is written."""

    async def first() -> TrainState:
        state = await begin(run)
        await run.checkpoints.finish()
        return state

    return wait_for(first())


def replace_in(run: Run, name: str, value: object) -> None:
    object.__setattr__(run, name, value)


def test_the_table_tells_true_shuffled_and_blank_images_apart(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    wait_for(run.weight_sync.sync(0))
    true = {task.id: np.asarray(task.images[0].source) for task in run.sources.test.tasks}

    async def evaluate(source: PromptSource, size: int | None = None, *_: object) -> Evaluation:
        pictures = {task.id: np.asarray(task.images[0].source) for task in source.tasks}
        if all(np.array_equal(picture, true[name]) for name, picture in pictures.items()):
            return of(0.75)
        return of(0.25 if all(len(np.unique(picture)) == 1 for picture in pictures.values()) else 0.5)

    run.evaluator.evaluate = evaluate  # type: ignore[method-assign]
    with run.metrics:
        summary = wait_for(finish(run, TrainState(kl_coef=0.0, before=of(0.1), after_warmup=of(0.2))))
    figures = summary.to_json()
    assert figures["accuracy"] == {"before": 0.1, "warmup": 0.2, "final": 0.75}
    assert (figures["shuffled_images"], figures["blank_images"]) == (0.5, 0.25)


@pytest.mark.parametrize("stored", ["", "no json"])
def test_pictures_of_held_out_rows_never_end_a_run(stored: str, tmp_path: Path) -> None:
    """One image cannot be opened again, and an earlier file may be damaged."""
    run = run_of(tmp_path)
    wait_for(run.weight_sync.sync(0))
    threads = set[int]()

    def open_image(reference: ImageRef) -> Image:
        if not threads:
            threads.add(threading.get_ident())
            raise BadRowError("gone", "image_missing")
        return run_open(reference)

    run_open = run.open_image
    replace_in(run, "open_image", open_image)
    if stored:
        (tmp_path / "answers").mkdir()
        (tmp_path / "answers" / "pictures-dev.json").write_text(stored)
    wait_for(read_dev(run, "now", 0))
    pictures = read_pictures(tmp_path, "dev")
    assert [row for row, names in pictures.items() if not names] == [run.sources.dev.tasks[0].id]
    assert len(pictures) > 1
    assert threading.get_ident() not in threads, "the event loop waits for nothing"


def test_sampled_dev_answers_are_drawn_as_the_settings_say(tmp_path: Path) -> None:
    run = bandit_run(tmp_path)
    wait_for(begin(run))
    assert wait_for(sample_dev(run)) == {}
    settings = {"dev_samples_per_prompt": 4, "temperature": 0.7, "top_p": 0.9, "dev_size": 9}
    evaluate = run.config.evaluate.model_copy(update=settings)
    replace_in(run, "config", run.config.model_copy(update={"evaluate": evaluate}))
    sampling = replace(rollout_sampling(run.config, run.environment), temperature=0.7, top_p=0.9)
    rows = wait_for(run.evaluator.answers(run.sources.dev, 9, sampling=sampling, n=4, seed=run.config.seed))
    accuracies = [[answer.accuracy for answer in row.answers] for row in rows]
    assert {len(each) for each in accuracies} == {4}
    assert len(set(map(tuple, accuracies))) > 1
    expected = {"dev/mean@4": np.mean(accuracies), "dev/pass@4": np.mean(np.max(accuracies, axis=1))}
    assert wait_for(sample_dev(run)) == pytest.approx(expected)
    assert evaluation_sampling(run.config, run.environment) == sampling


@pytest.mark.parametrize("resume", [False, True])
def test_a_warm_up_runs_once_and_rl_starts_from_it(resume: bool, tmp_path: Path) -> None:
    events: list[str] = []

    def run_with_warmup() -> Run:
        run = bandit_run(tmp_path, resume=resume)
        settings = Warmup(max_steps=2, batch_size=1)
        stage = WarmupStage(
            settings=settings,
            order=Order(["all"] * 16, weights={}, seed=0),
            source=run.sources.train,
            environment=run.environment,
            answer_ids=lambda _prompt, text, _row: (ANSWERS.index(text),),
        )
        replace_in(run, "warmup", stage)
        policy, engine, evaluate = run.policy, run.engine, run.evaluator.evaluate

        def noted(event: str, result: Metrics | None = None) -> Any:
            async def call(*_: object) -> Metrics | None:
                events.append(event)
                return result

            return call

        async def read(source: PromptSource, *limits: Any) -> Evaluation:
            events.append("reading")
            return await evaluate(source, *limits)

        policy.sft, policy.snapshot_reference = noted("pairs", {"loss": 0.0}), noted("snapshot")  # type: ignore[method-assign]
        engine.sleep, engine.wake = noted("sleep"), noted("wake")  # type: ignore[method-assign]
        run.evaluator.evaluate = read  # type: ignore[method-assign]
        return run

    state = begun(run_with_warmup())
    assert events == ["reading", "sleep", "pairs", "pairs", "snapshot", "wake", "reading"]
    assert state.after_warmup is not None
    if resume:
        events.clear()
        again = begun(run_with_warmup())
        assert events == []
        assert (again.step, again.after_warmup) == (0, state.after_warmup)


def test_rows_without_images_have_no_controls(tmp_path: Path) -> None:
    run = bandit_run(tmp_path, max_steps=1, evaluate={"image_controls": True, "shared_images": "ignore"})
    figures = train(run).to_json()
    assert figures["shuffled_images"] is figures["blank_images"] is None


CHANGED = {
    "learning_rate": (0.1, 0.05),
    "vision_tower_learning_rate": (0.01, 0.02),
    "projector_learning_rate": (None, 0.03),
    "max_grad_norm": (1.0, 0.5),
}
"""The advice after a run that diverged, a lower rate from its last checkpoint on: before and now."""


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"lr_schedule": "linear"}, {"lr_schedule": "linear"}, ["max_steps was 2 and is 3 from here on"]),
        (
            {"learning_rate": 0.1, "vision_tower_learning_rate": 0.01},
            {name: now for name, (_, now) in CHANGED.items()},
            [f"train.{name} was {before} and is {now} from here on" for name, (before, now) in CHANGED.items()],
        ),
    ],
    ids=["another end", "a lower rate"],
)
def test_a_resumed_run_says_what_paces_it_now(
    before: Mapping[str, object], now: Mapping[str, object], expected: list[str], tmp_path: Path
) -> None:
    train(bandit_run(tmp_path, max_steps=2, train=before))
    resumed = bandit_run(tmp_path, resume=True, max_steps=3, train=now)
    lines = printed_in(resumed)
    train(resumed)
    assert [line for line in lines if line.endswith("from here on")] == expected


def test_reasons_of_unscored_groups_stand_once_after_a_resume(tmp_path: Path) -> None:
    run = bandit_run(tmp_path)
    state = begun(run)
    record_unscored_answer(tmp_path, run.progress.warn, "before")
    wait_for(save_last(run, replace(state, step=10)))
    record_unscored_answer(tmp_path, run.progress.warn, "after")
    wait_for(begin(bandit_run(tmp_path, resume=True)))
    assert [json.loads(line)["reason"] for line in (tmp_path / "unscored.jsonl").read_text().splitlines()] == ["before"]


@pytest.mark.parametrize(
    ("of_second_step", "begin", "end"),
    [
        (
            {"microbatch/out_of_memory": 1.0, "microbatch/max_tokens": 512.0},
            "step 2: memory ran out in the update",
            "of 512 tokens at most from here on, in place of train.max_tokens_per_microbatch=16384",
        ),
        ({"transfer/engines_lost": 1.0}, "step 2: engines whose process ended or hung: 1; the run continues", ""),
    ],
    ids=["memory ran out", "a lost engine"],
)
def test_what_an_update_did_without_is_said_once(of_second_step: Metrics, begin: str, end: str, tmp_path: Path) -> None:
    class Policy(BanditPolicy):
        async def update(self, batch: Batch) -> Metrics:
            of_step = of_second_step if self.updates == 1 else dict.fromkeys(of_second_step, 0.0)
            return await super().update(batch) | of_step

    run = bandit_run(tmp_path, max_steps=4)
    run.policy.__class__ = Policy
    lines = printed_in(run)
    train(run)
    (said,) = [line for line in lines if line.startswith(begin)]
    assert said.endswith(end)
    assert sum(begin.partition(": ")[2] in line for line in lines) == 1


@table(("counting", "existence", "stop"), [(1.0, 0.6, False), (0.2, 0.8, True), (0.1, 0.7, False), (0.4, 0.6, False)])
def test_the_stop_rule_looks_at_the_whole_and_at_named_kinds(counting: float, existence: float, stop: bool) -> None:
    settings = Warmup(stop_accuracy=0.5, stop_kind_accuracy={"existence": 0.7})
    dev = Evaluation(accuracies={"counting": (counting,), "existence": (existence,)})
    assert enough(dev, settings) is stop


class CountingPolicy(BanditPolicy):
    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[Sequence[SftExample]] = []

    async def sft(self, pairs: Sequence[SftExample]) -> Metrics:
        self.pairs.append(pairs)
        return {"loss": 0.5}


def stage(**settings: object) -> WarmupStage:
    source, _ = make_source(["a", "b"])
    return WarmupStage(
        settings=Warmup.model_validate({"batch_size": 3, "check_every_steps": 4, **settings}),
        order=Order(["all", "all"], weights={}, seed=0),
        source=source,
        environment=BanditEnvironment(),
        answer_ids=lambda _prompt, text, _row: (ANSWERS.index(text), 9),
    )


@pytest.mark.parametrize(("max_steps", "taken"), [(800, 8), (6, 6)])
def test_it_stops_at_the_first_reading_that_is_enough_and_at_max_steps(max_steps: int, taken: int) -> None:
    policy, accuracies, lines = CountingPolicy(), iter([0.3, 0.9, 1.0]), list[str]()

    async def read_dev() -> Evaluation:
        return Evaluation(accuracies={"all": (next(accuracies),)})

    settings = stage(stop_accuracy=0.5, max_steps=max_steps)
    steps = wait_for(warm_up(settings, policy, read_dev, lines.append, lines.append))
    assert steps == len(policy.pairs) == taken
    assert {len(batch) for batch in policy.pairs} == {3}
    assert policy.pairs[0][0].answer_ids == (0, 9)
    readings = [f"warm-up 4/{max_steps}  loss 0.50  dev accuracy 0.30", "warm-up 8/800  loss 0.50  dev accuracy 0.90"]
    assert lines == readings[: taken // 4]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_the_mean_cross_entropy_of_the_answers(family: str) -> None:
    parts = tiny(family)
    prompts = mixed_prompts(parts)
    answers = [renderer(parts).target(text) for text in ("\\boxed{3}", "\\boxed{red}", "yes")]
    pairs = [SftExample(prompt=p, answer_ids=a) for p, a in zip(prompts, answers, strict=True)]
    expected = -torch.cat([reference_logprobs(parts, pair.prompt, np.array(pair.answer_ids)) for pair in pairs]).mean()
    trainer = supervised_trainer(
        VLM(parts.network, parts.processor.banned_ids), Warmup(lr_warmup_steps=0, learning_rate=3e-3)
    )
    losses = [trainer.update(pairs) for _ in range(40)]
    assert losses[0] == pytest.approx(float(expected.detach()), abs=1e-5)
    assert losses[-1] < 0.05 < losses[0]


def small_trainer(**options: bool) -> tuple[TinyParts, SupervisedTrainer, list[SftExample]]:
    parts = tiny("qwen3_vl")
    pairs = [SftExample(prompt=mixed_prompts(parts)[0], answer_ids=renderer(parts).target("\\boxed{3}"))]
    return parts, supervised_trainer(VLM(parts.network, parts.processor.banned_ids), Warmup(), **options), pairs


def test_gradients_of_the_warm_up_are_clipped() -> None:
    parts, trainer, pairs = small_trainer()
    norms: list[torch.Tensor] = []
    trainer.optimizer.adamw.register_step_pre_hook(
        lambda *_: norms.extend(p.grad.norm() for p in parts.network.parameters() if p.grad is not None)
    )
    trainer.update(pairs)
    assert float(torch.stack(norms).norm()) == pytest.approx(1.0, rel=1e-3)
    assert all(p.grad is None for p in parts.network.parameters()), "they are freed behind the step"


def test_a_warm_up_with_offload_takes_the_same_steps_by_masters_of_its_own() -> None:
    """Its master weights and moments were on the GPU, whatever train.backend.cpu_offload said."""
    weights = []
    for offload in (False, True):
        parts, trainer, pairs = small_trainer(cpu_offload=offload)
        losses = [trainer.update(pairs) for _ in range(2)]
        assert losses[1] != losses[0]
        masters = {x.data_ptr() for x in trainer.optimizer.masters.by_name.values()}
        assert masters.isdisjoint(x.data_ptr() for x in parts.network.parameters()) is offload
        weights.append(list(parts.network.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_a_banned_token_and_a_loss_that_is_no_number_stop_the_warm_up() -> None:
    parts, trainer, pairs = small_trainer()
    banned = parts.processor.banned_ids[0]
    with pytest.raises(TrainError, match=f"an answer of the warm-up holds token id {banned}, which is never sampled"):
        trainer.update([replace(pairs[0], answer_ids=(5, banned, parts.processor.stop_ids[0]))])
    with torch.no_grad():
        next(parts.network.parameters()).fill_(torch.nan)
    with pytest.raises(TrainError, match=r"the loss is nan at warm-up step 1; lower warmup\.learning_rate"):
        trainer.update(pairs)
