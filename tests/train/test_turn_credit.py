"""Rewards of turns in training: gradients that no split changes, and a run of two turns by PPO with GAE over turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fovea.advantages import with_advantages
from fovea.config.algorithm import Algorithm, Critic, Gae
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.report.samples import read_step
from fovea.samples import make_batch, with_old_logprobs, with_values
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Batch, Group
from fovea_gym.types import Score
from tests.policies import gradients_and_metrics
from tests.reference import largest_relative_difference
from tests.rollout.drawing import make_engine
from tests.rollout.two_turns import sampled
from tests.tiny_models import tiny
from tests.train.ppo_policies import ppo_policy
from tests.wiring.small import run_of

GAE = Gae(gamma=0.99, gae_lambda=0.95, turn_lambda=0.9, critic=Critic(value_clip=None))
PPO = Algorithm(name="ppo", ppo_epochs=1, entropy_coef=0.0, advantage=GAE, turn_discount=0.8)


def rewarded(groups: Sequence[Group]) -> list[Group]:
    """The groups with a random reward for every turn."""
    rng = np.random.default_rng(0)
    scores = (
        Score(reward=float(turns.sum()), accuracy=0, turns=tuple(turns.tolist())) for turns in rng.normal(size=(99, 3))
    )
    return [
        replace(group, episodes=tuple(replace(each, score=next(scores)) for each in group.episodes)) for group in groups
    ]


def batch_of(policy: TorchPolicy, groups: Sequence[Group]) -> Batch:
    batch, _ = make_batch(groups, PPO, max_new_tokens=7)
    logprobs, values = policy.logprobs_and_values(batch)
    return with_advantages(with_values(with_old_logprobs(batch, logprobs), values), PPO, 0.0)[0]


def test_no_split_changes_the_gradient_of_three_turns() -> None:
    results = []
    for max_tokens in (10_000, 200):
        parts = tiny("qwen3_vl")
        groups = rewarded(sampled(parts, make_engine(parts)))
        policy = ppo_policy(parts, max_tokens_per_microbatch=max_tokens, algorithm=PPO)
        batch = batch_of(policy, groups)
        assert all(len(sample.turn_rewards) == 3 for sample in batch.samples)
        gradient, metrics = gradients_and_metrics(policy, batch)
        results.append((gradient, metrics["loss"], metrics["value_loss"]))
    (whole, *losses), (split, *others) = results
    assert largest_relative_difference(whole, split) < 1e-5
    assert others == pytest.approx(losses, rel=1e-4, abs=1e-6)


ENVIRONMENT = """
from fovea_gym.types import Message, Task


class EvenTokens:
    max_turns = 2

    def tasks(self, split):
        return [Task(id=f"{split}/{number}", question=f"Say {number}.", answer="") for number in range(8)]

    def prompt(self, task):
        return [Message(role="user", parts=(task.question,))]

    def reply(self, task, turns):
        return [Message(role="tool", tool="echo", parts=("Again.",))]

    def score(self, task, turns):
        return {"turns": [float((turn.tokens.completion.token_ids_T % 2 == 0).mean()) for turn in turns]}

    def target(self, task):
        return "yes"
"""
"""Every turn is paid by its share of even token ids, half of which a model draws that has not learned."""


@pytest.mark.slow
def test_ppo_over_turns_learns_what_every_turn_is_paid_for(tmp_path: Path) -> None:
    (tmp_path / "even.py").write_text(ENVIRONMENT)
    run = run_of(
        tmp_path / "run",
        environment=f"{tmp_path / 'even.py'}:EvenTokens",
        max_steps=16,
        rollout={"prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 4},
        algorithm={
            "name": "ppo",
            "advantage": {"gamma": 1.0, "gae_lambda": 0.95, "turn_lambda": 0.95},
            "turn_discount": 0.9,
            "ppo_epochs": 1,
        },
        train={"learning_rate": 3e-3, "lr_warmup_steps": 0},
        evaluate={"before_training": False, "image_controls": False},
        checkpoint={"every_steps": 0},
    )
    train(run)
    steps = read_metrics(tmp_path / "run")
    for turn in (1, 2):
        rewards = [step[f"turns/{turn}/reward"] for step in steps]
        assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.1, rewards
    for step in steps:
        assert step["reward"] == pytest.approx(step["turns/1/reward"] + step["turns/2/reward"])
        assert 1 <= step["turns/1/tokens"] <= 4
        assert step["tools/calls/echo"] == 1
    (answer, *_) = read_step(tmp_path / "run", 1)[0].answers
    assert sum(turn.reward or 0.0 for turn in answer.turns) == pytest.approx(answer.reward)
    assert [message.tool for message in answer.turns[1].messages] == ["echo"]
