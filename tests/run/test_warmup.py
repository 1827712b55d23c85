"""The supervised stage: its stop rule, and that it teaches a tiny model its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from fovea.config.sections import Warmup
from fovea.data.order import Order
from fovea.errors import TrainError
from fovea.models.tiny import TinyParts
from fovea.models.vlm import VLM
from fovea.run.warmup import WarmupStage, enough, warm_up
from fovea.train.base import SftExample
from fovea.train.sft import SupervisedTrainer
from fovea.train.torch.policy import supervised_trainer
from fovea.types import Evaluation, Metrics
from fovea_gym.utils.event_loop import wait_for
from gym_tests.bandit import ANSWERS, BanditEnvironment
from tests.environments.prompt_sources import make_source
from tests.fakes import BanditPolicy
from tests.reference import reference_logprobs
from tests.tiny_models import FAMILIES, mixed_prompts, renderer, tiny


@pytest.mark.parametrize(
    ("counting", "existence", "stop"), [(1.0, 0.6, False), (0.2, 0.8, True), (0.1, 0.7, False), (0.4, 0.6, False)]
)
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
    trainer = supervised_trainer(VLM(parts.network, parts.processor.banned_ids), Warmup(lr_warmup_steps=0))
    losses = [trainer.update(pairs) for _ in range(80)]
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
    with pytest.raises(TrainError, match=f"an answer of the warm-up holds token id {banned}, which completions never"):
        trainer.update([replace(pairs[0], answer_ids=(5, banned, parts.processor.stop_ids[0]))])
    with torch.no_grad():
        next(parts.network.parameters()).fill_(torch.nan)
    with pytest.raises(TrainError, match=r"the loss is nan at warm-up step 1; lower warmup\.learning_rate"):
        trainer.update(pairs)
