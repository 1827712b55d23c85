"""Five steps on two ranks, and on four as two replicas of two, against one process, over what a run may combine.

Families, algorithms, what is trained, and how memory is saved; `test_ranks` has what can go wrong in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import pytest

from fovea.train.ranks import ALONE, Ranks
from fovea.types import Batch
from tests.augmentations import MASK
from tests.process_ranks import found_by_ranks
from tests.tiny_models import mixed_prompts, tiny
from tests.train.rank_policies import STEPS, Found, assert_as_one_process, batch_of, checksum, policy_of, step

GRPO = {"kl": {"coef": 0.05}}
PPO = {"name": "ppo", "minibatches": 2}
SELECTIVE = {"gradient_checkpointing": "selective"}
OFFLOADED = {"backend": {"cpu_offload": True}, "gradient_checkpointing": "full"}
FROZEN = {"freeze_vision_tower": True}
PROJECTOR = {"freeze_vision_tower": True, "freeze_projector": False}
TOWER = {"freeze_projector": True}
LORA = {"lora": {"rank": 4}}
PAPO = {"augmentation": {"name": "papo", "coef": 0.3}}
VPPO = {"augmentation": {"name": "vppo"}}
BOTH_VIEWS = {"max_tokens_per_microbatch": 150}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A combination of settings."""

    family: str
    algorithm: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    is_text_on_one: bool = False
    """Two groups, one with an image: a rank has text only."""

    def batch(self, seed: int) -> Batch:
        batch = batch_of(seed, self.family)
        if "views" in self.algorithm:
            masked = itemgetter(0, 1, 2, 1, 2)(mixed_prompts(tiny(self.family), MASK))
            groups = zip(batch.groups, masked, strict=True)
            return replace(batch, groups=tuple(replace(group, masked=prompt) for group, prompt in groups))
        return Batch(groups=(batch.groups[0], batch.groups[2])) if self.is_text_on_one else batch


TWO = {
    "grpo": Case(family="qwen2_vl", algorithm=GRPO, train=SELECTIVE),
    "grpo, frozen tower": Case(family="qwen2_5_vl", algorithm=GRPO, model=FROZEN),
    "grpo, lora": Case(family="qwen3_vl", algorithm=GRPO, model=LORA, train=SELECTIVE),
    "grpo, projector": Case(family="qwen3_vl", algorithm=GRPO, model=PROJECTOR, train=SELECTIVE),
    "grpo, offloaded": Case(family="qwen3_vl", algorithm=GRPO, train=OFFLOADED),
    "grpo, text on one": Case(family="qwen2_5_vl", algorithm=GRPO, is_text_on_one=True),
    "papo": Case(family="qwen3_vl", algorithm=PAPO, train=BOTH_VIEWS),
    "vppo": Case(family="qwen2_5_vl", algorithm=VPPO, train=BOTH_VIEWS),
    "ppo": Case(family="qwen2_5_vl", algorithm=PPO),
    "ppo, frozen tower": Case(family="qwen3_vl", algorithm=PPO, model=FROZEN),
    "ppo, lora": Case(family="qwen2_vl", algorithm=PPO, model=LORA),
    "ppo, tower without projector": Case(family="qwen2_vl", algorithm=PPO, model=TOWER),
    "ppo, text on one": Case(family="qwen3_vl", algorithm=PPO, is_text_on_one=True),
}
FOUR = {
    "grpo": Case(family="qwen3_vl", algorithm=GRPO, train=SELECTIVE),
    "grpo, frozen tower": Case(family="qwen2_vl", algorithm=GRPO, model=FROZEN, train=OFFLOADED),
    "ppo, lora": Case(family="qwen2_5_vl", algorithm=PPO, model=LORA),
}


def run(case: Case, ranks: Ranks) -> Found:
    policy = policy_of(ranks, case.algorithm, family=case.family, model=case.model, train=case.train)
    return {"metrics": [step(policy, case.batch(seed)) for seed in range(STEPS)], "weights": checksum(policy)}


def process(rank: int, cases: dict[str, Case], replicas: int) -> dict[str, Found]:
    ranks = Ranks.of_process_group("cpu", replicas=replicas)
    return {name: run(case, ranks) for name, case in cases.items()}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return found_by_ranks(process, TWO, 1, folder=tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return found_by_ranks(process, FOUR, 2, folder=tmp_path_factory.mktemp("four"), num_ranks=4)


def assert_five_steps(found: Sequence[Found], alone: Found) -> None:
    assert len(alone["metrics"]) == STEPS
    assert all(row["grad_norm"] > 0 for row in alone["metrics"])
    assert_as_one_process(found, alone)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", TWO)
def test_two_ranks_train_as_one_process(name: str, two: list[dict[str, Found]]) -> None:
    assert_five_steps([found[name] for found in two], run(TWO[name], ALONE))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", FOUR)
def test_two_replicas_of_two_ranks_train_as_one_process(name: str, four: list[dict[str, Found]]) -> None:
    assert_five_steps([found[name] for found in four], run(FOUR[name], ALONE))
