"""PPO's value function: its loss and gradient, the layouts that must not change them, and what is trained when."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from fovea.advantages import with_advantages
from fovea.config.algorithm import Algorithm, Critic, Gae
from fovea.config.run import Config
from fovea.loop import train
from fovea.metrics.names import undefined
from fovea.models import trained_layer as linears
from fovea.models.decoder import DecoderLayer, LayerCall
from fovea.models.recompute import recompute_activations
from fovea.models.tiny import TinyParts
from fovea.models.trainable import policy_parameters
from fovea.run.checkpoint import estimated_bytes
from fovea.samples import replace_samples, with_old_logprobs, with_values
from fovea.train.local import LocalPolicy
from fovea.train.torch.policy import TorchPolicy
from fovea.wiring.run import build
from tests.policies import NUM_TOKENS, gradients_and_metrics, make_batch, update_gradients
from tests.reference import largest_relative_difference, reference_logprobs, reference_states
from tests.runs import untimed
from tests.saved import save_policy, saved_bytes
from tests.tiny_models import FAMILIES, tiny
from tests.train.ppo_policies import GAE, PPO, logprobs_and_values, ppo_policy, scored, with_rewards


class CountLayers:
    """How often a decoder layer was run."""

    def __enter__(self) -> CountLayers:
        self.count = 0
        self._real = linears.run_layer

        def counting(layer: DecoderLayer, hidden_NE: torch.Tensor, call: LayerCall) -> torch.Tensor:
            self.count += 1
            return self._real(layer, hidden_NE, call)

        linears.run_layer = counting  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        linears.run_layer = self._real


@pytest.mark.parametrize("separate", [False, True])
def test_values_are_the_head_on_transformers_own_states(parts: TinyParts, separate: bool) -> None:
    """One row at a time through transformers; packed and shared prefixes change nothing."""
    policy, batch = ppo_policy(parts, separate=separate, max_tokens_per_microbatch=100), make_batch(parts)
    critic = policy.value_function
    assert critic is not None
    head = (policy.vlm.value_head if critic.model is None else critic.model.head).linear  # type: ignore[union-attr]
    _, values = logprobs_and_values(policy, batch)
    samples = [(group.prompt, sample) for group in batch.groups for sample in group.samples]
    for (prompt, sample), values_T in zip(samples, values, strict=True):
        states_TE = reference_states(parts, prompt, sample.token_ids_T)
        np.testing.assert_allclose(values_T, head(states_TE)[:, 0].detach(), atol=1e-5)


def test_the_gradient_is_that_of_the_written_out_loss(parts: TinyParts) -> None:
    """Policy loss at ratio 1 plus value_coef times half the squared error, token mean; through transformers."""
    policy = ppo_policy(parts)
    batch = scored(policy, make_batch(parts))
    head = policy.vlm.value_head
    assert head is not None
    loss = torch.zeros(())
    for group in batch.groups:
        for sample in group.samples:
            assert sample.advantages_T is not None
            assert sample.returns_T is not None
            logprobs_T = reference_logprobs(parts, group.prompt, sample.token_ids_T, temperature=0.9)
            values_T = head.linear(reference_states(parts, group.prompt, sample.token_ids_T))[:, 0]
            ratio_T = (logprobs_T - logprobs_T.detach()).exp()
            loss = loss - (ratio_T * torch.from_numpy(sample.advantages_T)).sum()
            loss = loss + 0.5 * 0.5 * (values_T - torch.from_numpy(sample.returns_T)).square().sum()
    (loss / NUM_TOKENS).backward()
    expected = {name: p.grad.clone() for name, p in policy.vlm.named_parameters() if p.grad is not None}
    policy.vlm.zero_grad()
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
    critic = policy.value_function
    assert critic is not None
    parts = {"policy": policy_parameters(policy.vlm), "value": critic.optimizer.parameters}
    before = {part: [p.detach().clone() for p in named.values()] for part, named in parts.items()}
    change()
    return {
        part
        for part, named in parts.items()
        if any(not torch.equal(a, b) for a, b in zip(before[part], named.values(), strict=True))
    }


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
    assert changed(policy, lambda: policy.update(no_advantage)) == (
        {"value"} if separate or detach else {"policy", "value"}
    )


def test_values_learn_what_rewards_to_expect() -> None:
    parts = tiny("qwen3_vl")
    policy = ppo_policy(parts, learning_rate=1e-12)
    batch = scored(policy, make_batch(parts))
    errors = [policy.update(batch)["value_loss"] for _ in range(30)]
    assert errors[-1] < 0.2 * errors[0]


def test_an_update_ends_where_the_policy_has_gone_far_enough() -> None:
    far = PPO.model_copy(update={"ppo_epochs": 8, "max_policy_kl": 1e-3})
    parts = tiny("qwen3_vl")
    policy = ppo_policy(parts, algorithm=far, learning_rate=1e-2)
    metrics = policy.update(scored(policy, make_batch(parts)))
    assert 0 < metrics["epochs_run"] < 8
    assert metrics["kl/policy"] > 1e-3, "the last pass has gone too far, and takes no step"
    free = ppo_policy(tiny("qwen3_vl"), algorithm=far.model_copy(update={"max_policy_kl": None}), learning_rate=1e-2)
    assert free.update(scored(free, make_batch(parts)))["epochs_run"] == 8


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
        with CountLayers() as calls:
            gradient = update_gradients(policy, batch)
        results.append((gradient, calls.count))
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
    assert policy.value_function is not None
    assert policy.value_function.model is not None
    for (name, a), (_, b) in zip(
        policy.vlm.named_parameters(), policy.value_function.model.trunk.named_parameters(), strict=True
    ):
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


def saved(folder: Path, step: int, name: str) -> bytes:
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
            assert saved(stopped, step, name) == saved(whole, step, name), f"{name} of step {step}"
    assert untimed(stopped) == untimed(whole)
    policies = [saved(stopped, step, "trainable") for step in range(STEPS + 1)]
    assert [a == b for a, b in pairwise(policies)] == [True] * WARM_UP + [False] * (STEPS - WARM_UP)
    assert len({saved(stopped, step, "value") for step in range(STEPS + 1)}) == STEPS + 1
