"""PPO's value function: its loss and gradient, what must not change them, what is trained when, and credit by turns."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from fovea.advantages import with_advantages
from fovea.config.algorithm import Algorithm, Critic, Gae
from fovea.config.run import Config
from fovea.errors import TrainError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.metrics.names import undefined
from fovea.models import trained_layer as linears
from fovea.models.recompute import recompute_activations
from fovea.models.tiny import TinyParts
from fovea.models.trainable import VALUE_HEAD, policy_parameters
from fovea.report.samples import read_step
from fovea.run.checkpoint import estimated_bytes
from fovea.samples import make_batch as batch_of_groups
from fovea.samples import replace_samples, with_old_logprobs, with_values
from fovea.train.local import LocalPolicy
from fovea.train.torch.policy import TorchPolicy, make_policy
from fovea.types import Batch, Group
from fovea.wiring.model import make_vlm
from fovea.wiring.run import build
from fovea_gym.types import Score
from tests.policies import (
    GAE,
    NUM_TOKENS,
    PPO,
    gradients_and_metrics,
    logprobs_and_values,
    make_batch,
    pairs_of,
    ppo_policy,
    scored,
    update_gradients,
    with_rewards,
)
from tests.reference import gradients, largest_relative_difference, reference_logprobs, reference_states
from tests.rollout.drawing import make_engine
from tests.rollout.two_turns import sampled
from tests.runs import untimed
from tests.saved import save_policy, saved_bytes, saved_tensors
from tests.tiny_models import FAMILIES, tiny
from tests.wiring.small import run_of


@pytest.mark.parametrize("separate", [False, True])
def test_values_are_the_head_on_transformers_own_states(parts: TinyParts, separate: bool) -> None:
    """One row at a time through transformers; packed and shared prefixes change nothing."""
    policy, batch = ppo_policy(parts, separate=separate, max_tokens_per_microbatch=100), make_batch(parts)
    critic = policy.value_function
    head = (policy.vlm.value_head if critic.model is None else critic.model.head).linear
    _, values = logprobs_and_values(policy, batch)
    for (prompt, sample), values_T in zip(pairs_of(batch), values, strict=True):
        states_TE = reference_states(parts, prompt, sample.token_ids_T)
        np.testing.assert_allclose(values_T, head(states_TE)[:, 0].detach(), atol=1e-5)


def test_the_gradient_is_that_of_the_written_out_loss(parts: TinyParts) -> None:
    """Policy loss at ratio 1 plus value_coef times half the squared error, token mean; through transformers."""
    policy = ppo_policy(parts)
    batch = scored(policy, make_batch(parts))
    loss = torch.zeros(())
    for prompt, sample in pairs_of(batch):
        logprobs_T = reference_logprobs(parts, prompt, sample.token_ids_T, temperature=0.9)
        values_T = policy.vlm.value_head.linear(reference_states(parts, prompt, sample.token_ids_T))[:, 0]
        ratio_T = (logprobs_T - logprobs_T.detach()).exp()
        loss = loss - (ratio_T * torch.from_numpy(sample.advantages_T)).sum()
        loss = loss + 0.5 * 0.5 * (values_T - torch.from_numpy(sample.returns_T)).square().sum()
    (loss / NUM_TOKENS).backward()
    expected = gradients(policy.vlm)
    assert largest_relative_difference(expected, update_gradients(policy, batch)) < 1e-5


@pytest.mark.parametrize("separate", [False, True])
def test_no_split_changes_gradient_or_metrics(separate: bool) -> None:
    results = []
    for max_tokens in (10_000, 300, 75):
        parts = tiny("qwen3_vl")
        policy = ppo_policy(parts, separate=separate, max_tokens_per_microbatch=max_tokens)
        gradient, metrics = gradients_and_metrics(policy, scored(policy, make_batch(parts)))
        del metrics["memory/activations_gib"], metrics["microbatch/max_tokens"], metrics["balance/microbatches"]
        results.append((gradient, metrics))
    for gradient, metrics in results[1:]:
        assert largest_relative_difference(results[0][0], gradient) < 1e-5
        assert metrics == pytest.approx(results[0][1], rel=1e-4, abs=1e-6)


def changed(policy: TorchPolicy, change: Callable[[], object]) -> set[str]:
    """Which parts move: the policy, the value function."""
    parts = {"policy": policy_parameters(policy.vlm), "value": policy.value_function.optimizer.parameters}
    before = {part: [p.detach().clone() for p in named.values()] for part, named in parts.items()}
    change()
    return {part for part, named in parts.items() if not all(map(torch.equal, before[part], named.values()))}


@pytest.mark.parametrize("separate", [False, True])
def test_the_policy_waits_while_the_critic_warms_up(separate: bool) -> None:
    parts = tiny("qwen3_vl")
    critic = GAE.critic.model_copy(update={"warmup_steps": 1})
    algorithm = PPO.model_copy(update={"advantage": GAE.model_copy(update={"critic": critic})})
    policy = ppo_policy(parts, separate=separate, algorithm=algorithm)
    assert changed(policy, lambda: policy.update(scored(policy, make_batch(parts)))) == {"value"}
    assert changed(policy, lambda: policy.update(scored(policy, make_batch(parts)))) == {"policy", "value"}


@pytest.mark.parametrize(("separate", "detach"), [(False, False), (False, True), (True, False)])
def test_a_value_loss_reaches_the_policy_through_a_shared_trunk_only(separate: bool, detach: bool) -> None:
    parts = tiny("qwen3_vl")
    policy = ppo_policy(parts, separate=separate, detach_trunk=detach)
    batch = scored(policy, make_batch(parts))
    no_advantage = replace_samples(batch, lambda s: replace(s, advantages_T=0 * s.advantages_T))
    moved = {"value"} if separate or detach else {"policy", "value"}
    assert changed(policy, lambda: policy.update(no_advantage)) == moved


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_policy_goes_on_bit_for_bit(family: str, separate: bool, tmp_path: Path) -> None:
    batches = [make_batch(tiny(family), seed) for seed in range(4)]
    whole, first, second = (ppo_policy(tiny(family, seed=s), separate=separate) for s in (0, 0, 9))
    expected = [whole.update(scored(whole, batch)) for batch in batches]
    for batch in batches[:2]:
        first.update(scored(first, batch))
    save_policy(first, tmp_path)
    second.load(tmp_path)
    assert [second.update(scored(second, batch)) for batch in batches[2:]] == expected[2:]


@pytest.mark.parametrize("separate", [False, True])
def test_recomputed_activations_change_no_gradient_and_keep_less(separate: bool) -> None:
    results = []
    for recompute in ("none", "full"):
        parts = tiny("qwen3_vl")
        recompute_activations(parts.network, recompute)
        policy = ppo_policy(parts, separate=separate)
        batch = scored(policy, make_batch(parts))
        with patch.object(linears, "run_layer", wraps=linears.run_layer) as layers_run:
            gradient = update_gradients(policy, batch)
        results.append((gradient, layers_run.call_count))
    (plain, none), (recomputed, some) = results
    assert largest_relative_difference(plain, recomputed) < 1e-5
    layers = 3 * (2 if separate else 1)
    assert (none, some) == (layers, 2 * layers), "the critic's layers too"


def test_a_critic_of_its_own_begins_as_the_warmed_up_policy() -> None:
    parts = tiny("qwen3_vl")
    policy = ppo_policy(parts, separate=True)
    with torch.no_grad():
        for parameter in parts.network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    policy.snapshot_reference()
    trunk = policy.value_function.model.trunk
    for (name, a), (_, b) in zip(policy.vlm.named_parameters(), trunk.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("separate", [False, True])
def test_the_room_that_a_checkpoint_needs_includes_the_value_function(separate: bool, tmp_path: Path) -> None:
    """Asked for before the first save; a separate critic with its moments was left out."""
    policy = ppo_policy(tiny("qwen3_vl"), separate=separate)
    policy.update(scored(policy, make_batch(tiny("qwen3_vl"))))
    save_policy(policy, tmp_path)
    written = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    assert estimated_bytes(LocalPolicy(policy)) == pytest.approx(written, rel=0.1)


VALUE_CLIP = 0.05


def algorithm(epochs: int) -> Algorithm:
    """Without a discount: the return of every action is the reward of its completion."""
    return Algorithm(name="ppo", ppo_epochs=epochs, advantage=Gae(critic=Critic(value_clip=VALUE_CLIP)))


@pytest.mark.parametrize("separate", [False, True])
def test_loss_clip_and_explained_variance_of_the_critic(separate: bool) -> None:
    """Of two epochs; the values that the second one sees are those that another policy has after its one."""
    policy, other = (ppo_policy(tiny("qwen3_vl"), separate=separate, algorithm=algorithm(epochs)) for epochs in (2, 1))
    batch = with_rewards(make_batch(tiny("qwen3_vl")))
    logprobs, values = logprobs_and_values(policy, batch)
    batch, metrics = with_advantages(with_values(with_old_logprobs(batch, logprobs), values), algorithm(2), 0.0)
    metrics |= policy.update(batch)
    other.update(batch)
    old, new = np.concatenate(values), np.concatenate(logprobs_and_values(other, batch)[1])
    returns = np.concatenate([np.full(len(sample.token_ids_T), sample.reward) for sample in batch.samples])
    plain = (new - returns) ** 2
    clipped = (np.clip(new, old - VALUE_CLIP, old + VALUE_CLIP) - returns) ** 2
    losses = [(old - returns) ** 2 / 2, np.maximum(plain, clipped) / 2]
    assert 0.1 < (clipped > plain).mean() < 0.9
    assert metrics["value_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert metrics["value_clip_frac"] == pytest.approx((clipped > plain).mean() / 2)
    unexplained = (returns - old).var() / returns.var()
    assert metrics["explained_variance"] == pytest.approx(1 - unexplained, rel=1e-4)
    assert metrics["value/mean"] == pytest.approx(old.mean(), rel=1e-4)
    assert metrics["return/mean"] == pytest.approx(returns.mean(), rel=1e-4)
    assert undefined(metrics) == []


STOPPED, WARM_UP, STEPS = 1, 2, 4
TINY = {"hidden_size": 32, "num_layers": 1, "vocabulary_size": 300}
REWARD = "def score(task, text, images):\n    return len(text) / 8\n"
"""One that an untrained model gets, some of it."""


def run(folder: Path, trunk: str, resume: str = "never") -> None:
    """A checkpoint after every step; the rate rises over all of them."""
    reward = folder.parent / "reward.py"
    reward.write_text(REWARD)
    critic = {"trunk": trunk, "warmup_steps": WARM_UP, "learning_rate": 1e-2}
    settings = {
        "run_dir": str(folder),
        "resume": resume,
        "max_steps": STEPS,
        "reward": f"{reward}:score",
        "model": {"tiny": TINY, "device": "cpu"},
        "environment": {"name": "shapes", "train_size": 16, "dev_size": 2, "test_size": 2},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4},
        "algorithm": {"name": "ppo", "ppo_epochs": 2, "advantage": {"critic": critic}},
        "train": {"learning_rate": 1e-2},
        "evaluate": {"image_controls": False, "shared_images": "ignore"},
        "parity": {"prompts": 0},
        "checkpoint": {"every_steps": 1, "keep": STEPS + 1},
        "log": {"tensorboard": False, "progress": False},
    }
    train(build(Config.model_validate(settings)))


def saved_part(folder: Path, step: int, name: str) -> bytes:
    return b"".join(saved_bytes(folder / "checkpoints" / f"step-{step}" / name).values())


@pytest.mark.parametrize("trunk", ["shared", "separate"])
def test_a_run_stopped_in_the_critics_warm_up_equals_one_never_stopped(trunk: str, tmp_path: Path) -> None:
    """Weights byte for byte, and the policy waits for as long."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run(whole, trunk)
    shutil.copytree(whole, stopped)
    for step in range(STOPPED + 1, STEPS + 1):
        shutil.rmtree(stopped / "checkpoints" / f"step-{step}")
    run(stopped, trunk, resume="auto")
    for step in range(STEPS + 1):
        for name in ("trainable", "value"):
            assert saved_part(stopped, step, name) == saved_part(whole, step, name), f"{name} of step {step}"
    assert untimed(stopped) == untimed(whole)
    policies = [saved_part(stopped, step, "trainable") for step in range(STEPS + 1)]
    assert [a == b for a, b in pairwise(policies)] == [True] * WARM_UP + [False] * (STEPS - WARM_UP)
    assert len({saved_part(stopped, step, "value") for step in range(STEPS + 1)}) == STEPS + 1


TRUNKS = ("shared", "separate")
CRITIC = "critic."
UPDATES = 3
"""A value head begins at 0, and so does half of an adapter: behind both the first gradient is that of the third."""
SMALL_RATE = 1e-6


def built_policy(
    trunk: str, dtype: torch.dtype = torch.float32, rate: float = 1e-2, **settings: dict[str, object]
) -> TorchPolicy:
    """As a run builds it from its settings."""
    critic = {"trunk": trunk, "learning_rate": rate}
    config = Config.model_validate(
        {
            "algorithm": {"name": "ppo", "ppo_epochs": 1, "advantage": {"critic": critic}},
            "train": {"learning_rate": 1e-3, "lr_warmup_steps": 0},
            **settings,
            "model": {"tiny": {}, "device": "cpu", **settings.get("model", {})},
        }
    )
    parts = tiny("qwen3_vl")
    for parameter in parts.network.parameters():
        parameter.data = parameter.data.to(dtype)
    return make_policy(config, make_vlm(config, parts.network, parts.processor.banned_ids))


def tensors(policy: TorchPolicy) -> dict[str, Tensor]:
    """Copies of all parameters and buffers; those of a model of its own begin with `critic.`."""
    named = dict(policy.vlm.state_dict())
    if policy.value_function.model is not None:
        named |= {f"{CRITIC}{name}": x for name, x in policy.value_function.model.state_dict().items()}
    return {name: x.detach().clone() for name, x in named.items()}


def update_thrice(policy: TorchPolicy) -> tuple[set[str], set[str]]:
    """A few updates; the names of what has moved, and of what is as it was to the last bit."""
    before = tensors(policy)
    for seed in range(UPDATES):
        policy.update(scored(policy, make_batch(tiny("qwen3_vl"), seed)))
    after = tensors(policy)
    assert all(x.isfinite().all() for x in after.values())
    same = {name for name, x in after.items() if x.view(torch.uint8).equal(before[name].view(torch.uint8))}
    return after.keys() - same, same


def of_values(names: set[str]) -> set[str]:
    """The part of the value function."""
    return {name for name in names if name.startswith((VALUE_HEAD, CRITIC))}


@pytest.mark.parametrize("trunk", TRUNKS)
def test_adapters_and_value_function_train_and_nothing_below_them(trunk: str) -> None:
    policy = built_policy(trunk, model={"lora": {"rank": 4}})
    moved, same = update_thrice(policy)
    heads = {f"{CRITIC}head.linear.weight", f"{CRITIC}head.linear.bias"}
    heads = heads if trunk == "separate" else {f"{VALUE_HEAD}linear.weight", f"{VALUE_HEAD}linear.bias"}
    adapters = {name for name in moved | same if ".lora_" in name}
    assert moved == adapters | heads
    assert len(of_values(adapters)) == (len(adapters) / 2 if trunk == "separate" else 0)
    assert any("base_layer" in name for name in same)


@pytest.mark.parametrize("trunk", TRUNKS)
def test_a_frozen_tower_stays_in_policy_and_critic_and_all_else_trains(trunk: str, tmp_path: Path) -> None:
    policy = built_policy(trunk, model={"freeze_vision_tower": True})
    moved, same = update_thrice(policy)
    towers = {name for name in moved | same if ".visual." in name}
    assert same == towers
    assert len(of_values(towers)) == (len(towers) / 2 if trunk == "separate" else 0)
    save_policy(policy, tmp_path)
    kept = [name for part in ("trainable", "value") for name in saved_tensors(tmp_path / part)]
    assert kept
    assert not any(".visual." in name for name in kept), "nor does it take memory of an optimizer"


def test_a_frozen_tower_of_the_critic_that_moves_is_noticed_before_it_is_saved(tmp_path: Path) -> None:
    policy = built_policy("separate", model={"freeze_vision_tower": True})
    save_policy(policy, tmp_path)
    name, frozen = next((n, p) for n, p in policy.value_function.model.named_parameters() if not p.requires_grad)
    with torch.no_grad():
        frozen.add_(1e-3)
    with pytest.raises(TrainError, match=name):
        save_policy(policy, tmp_path)


@pytest.mark.parametrize("trunk", TRUNKS)
def test_every_weight_of_policy_and_critic_trains_in_bfloat16(trunk: str) -> None:
    _, same = update_thrice(built_policy(trunk, torch.bfloat16))
    assert same == set()


@pytest.mark.parametrize("trunk", TRUNKS)
def test_small_steps_of_policy_and_critic_add_up_in_bfloat16(trunk: str, tmp_path: Path) -> None:
    """In float32 copies, of which the model holds the rounding; a value head is float32 itself."""
    rates = {"learning_rate": SMALL_RATE, "lr_warmup_steps": 0}
    policy = built_policy(trunk, torch.bfloat16, rate=SMALL_RATE, train=rates)
    before = tensors(policy)
    update_thrice(policy)
    save_policy(policy, tmp_path)
    after = tensors(policy)
    for part, prefix in (("trainable", ""), ("value", CRITIC if trunk == "separate" else "")):
        masters = saved_tensors(tmp_path / part)
        assert masters
        for name, master in masters.items():
            parameter = after[f"{prefix}{name}"]
            assert master.dtype == torch.float32
            assert torch.equal(parameter, master.to(parameter.dtype)), name
            moved = (master - before[f"{prefix}{name}"].float()).abs()
            assert moved.max() < 2 * UPDATES * SMALL_RATE, name
            if "up_proj" in name:  # of an embedding the rows of other tokens stay
                assert (moved > 0).float().mean() > 0.99, name
                assert moved.max() > 1.25 * SMALL_RATE, "more than one step of Adam can"


TURN_GAE = Gae(gamma=0.99, gae_lambda=0.95, turn_lambda=0.9, critic=Critic(value_clip=None))
OVER_TURNS = Algorithm(name="ppo", ppo_epochs=1, entropy_coef=0.0, advantage=TURN_GAE, turn_discount=0.8)


def rewarded(groups: Sequence[Group]) -> list[Group]:
    """The groups with a random reward for every turn."""
    rng = np.random.default_rng(0)
    scores = (
        Score(reward=float(turns.sum()), accuracy=0, turns=tuple(turns.tolist())) for turns in rng.normal(size=(99, 3))
    )
    return [
        replace(group, episodes=tuple(replace(each, score=next(scores)) for each in group.episodes)) for group in groups
    ]


def scored_turns(policy: TorchPolicy, groups: Sequence[Group]) -> Batch:
    batch, _ = batch_of_groups(groups, OVER_TURNS, max_new_tokens=7)
    logprobs, values = policy.logprobs_and_values(batch)
    return with_advantages(with_values(with_old_logprobs(batch, logprobs), values), OVER_TURNS, 0.0)[0]


def test_no_split_changes_the_gradient_of_three_turns() -> None:
    results = []
    for max_tokens in (10_000, 200):
        parts = tiny("qwen3_vl")
        groups = rewarded(sampled(parts, make_engine(parts)))
        policy = ppo_policy(parts, max_tokens_per_microbatch=max_tokens, algorithm=OVER_TURNS)
        batch = scored_turns(policy, groups)
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
            **{"name": "ppo", "ppo_epochs": 1, "turn_discount": 0.9},
            "advantage": {"gamma": 1.0, "gae_lambda": 0.95, "turn_lambda": 0.95},
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
