"""The loop on fakes: what each stage hands on, what is written down, and that a bandit learns."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fovea.errors import MicrobatchMemoryError, TrainError
from fovea.loop import take_step, train
from fovea.metrics.log import read_metrics
from fovea.run import lifecycle
from fovea.run.checkpoint import Checkpoints, write_manifest
from fovea.run.context import Run
from fovea.run.lifecycle import begin
from fovea.run.microbatches import MicrobatchTokens, left_limit
from fovea.run.sampling import training_sampling
from fovea.run.state import TrainState
from fovea.types import Batch, Group, Metrics
from fovea_gym.errors import DataError
from fovea_gym.types import AnswerEnd, Score
from fovea_gym.utils.event_loop import wait_for
from tests.fakes import BanditPolicy, bandit_run, printed_in, run_with
from tests.runs import untimed


def begun(folder: Path, **settings: object) -> Any:
    """A run before its first step."""
    run = bandit_run(folder, **settings)
    wait_for(begin(run))
    return run


def step_of(run: Run, step: int = 0) -> tuple[Sequence[Group], Metrics]:
    return wait_for(take_step(run, TrainState(step=step, kl_coef=0.0)))


def trained(folder: Path, **settings: object) -> Batch:
    """The batch of the only step of a run."""
    run: Any = bandit_run(folder, max_steps=1, **settings)
    train(run)
    (batch,) = run.policy.batches
    return batch


def test_a_bandit_learns(tmp_path: Path) -> None:
    """And each step has the promised metrics; of its checkpoints only the newest are kept."""
    summary = train(bandit_run(tmp_path))
    metrics = read_metrics(tmp_path)
    assert [row["step"] for row in metrics] == list(range(1, 31))
    assert metrics[0]["reward"] < 0.5 < 0.9 < metrics[-1]["reward"]
    assert summary.before is not None
    assert summary.before.accuracy < summary.final.accuracy == 1.0
    promised = "step reward loss grad_norm response_tokens_mean tokens_per_second seconds/rollout seconds/update"
    assert all(set(promised.split()) <= row.keys() for row in metrics)
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["step-20", "step-30"]
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 30


def test_the_time_limit_of_all_attempts_is_named_as_set(tmp_path: Path) -> None:
    """As a supervisor starts it after an hour; the setting was replaced by what was left of it."""
    run = replace(bandit_run(tmp_path, max_hours=1.0), spent_seconds=3600.0)
    said = printed_in(run)
    with pytest.raises(SystemExit) as ended:
        train(run)
    assert ended.value.code == 0
    assert said[-1].startswith("max_hours=1 is reached: saved at step 1;")


EVALUATED = {"after_max_hours": True, "image_controls": False, "shared_images": "ignore"}


def test_a_time_limit_evaluates_where_the_settings_say_so(tmp_path: Path) -> None:
    """And the run goes on from its checkpoint as any other."""
    with pytest.raises(SystemExit) as ended:
        train(bandit_run(tmp_path, max_hours=1e-9, evaluate=EVALUATED))
    assert ended.value.code == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 1
    assert summary["test"]["final"]["accuracy"]["n"] > 0
    assert (tmp_path / "report.html").is_file()
    assert train(bandit_run(tmp_path, max_steps=2, resume=True)).steps == 2


def test_a_signal_ends_the_evaluation_behind_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def finish(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the signal was only noted")

    monkeypatch.setattr(lifecycle, "finish", finish)
    with pytest.raises(SystemExit) as ended:
        train(bandit_run(tmp_path, max_hours=1e-9, evaluate=EVALUATED))
    assert ended.value.code == 128 + signal.SIGTERM
    assert (tmp_path / "checkpoints" / "step-1").is_dir()


def test_the_engine_draws_from_the_newest_weights_and_never_twice_with_one_seed(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.engine.seeds.clear()
    for step in range(3):
        groups, _ = step_of(run, step)
        turns = [turn for group in groups for episode in group.episodes for turn in episode.tokens]
        assert {turn.completion.version for turn in turns} == {step}
        np.testing.assert_array_equal(run.engine.table, run.policy.table)
    assert len(set(run.engine.seeds)) == 3 * 8


@pytest.mark.parametrize(("kl", "trained", "skipped"), [(None, 0, 8), ({"coef": 0.1}, 8, 0)])
def test_groups_without_signal_are_skipped_and_counted_unless_a_kl_term_acts_on_them(
    kl: object, trained: int, skipped: int, tmp_path: Path
) -> None:
    run = begun(tmp_path, algorithm={"kl": kl})
    run.policy.table[:] = 50 * np.eye(4)
    wait_for(run.weight_sync.sync(0))
    _, metrics = step_of(run)
    assert len(run.policy.batches[0].groups) == trained
    counts = [metrics[f"groups/{name}"] for name in ("with_signal", "without_signal", "skipped")]
    assert counts == [0, 8, skipped]


def test_old_and_reference_logprobs_only_where_needed(tmp_path: Path) -> None:
    """With several epochs the old ones are the first epoch's own."""
    for name, algorithm in (("on policy", {}), ("epochs", {"ppo_epochs": 2})):
        samples = trained(tmp_path / name, algorithm=algorithm).samples
        assert all(sample.old_logprobs_T is None and sample.reference_logprobs_T is None for sample in samples)
    for sample in trained(tmp_path / "off policy", algorithm={"minibatches": 2, "kl": {"coef": 0.1}}).samples:
        np.testing.assert_allclose(sample.old_logprobs_T, sample.rollout_logprobs_T, rtol=1e-6)
        np.testing.assert_allclose(sample.reference_logprobs_T, -np.log(4), rtol=1e-6)


@pytest.mark.parametrize(
    ("trunk", "minibatches", "scored"), [("shared", 1, True), ("separate", 1, False), ("separate", 2, True)]
)
def test_a_critic_of_its_own_asks_the_policy_only_where_the_first_epoch_has_several_steps(
    tmp_path: Path, trunk: str, minibatches: int, scored: bool
) -> None:
    """On the policy's trunk log-probs come with the values."""
    algorithm = {"name": "ppo", "minibatches": minibatches, "advantage": {"critic": {"trunk": trunk}}}
    batch = trained(tmp_path, algorithm=algorithm)
    assert all(sample.values_T is not None for sample in batch.samples)
    assert [sample.old_logprobs_T is not None for sample in batch.samples] == [scored] * len(batch.samples)


@pytest.mark.parametrize("stop_after", [10, 17])
def test_a_resumed_run_equals_one_never_stopped(tmp_path: Path, stop_after: int) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected: Any = bandit_run(whole)
    train(expected)
    train(bandit_run(broken, max_steps=stop_after))
    if stop_after % 10:  # the end of the first part also saves: go back to the last regular checkpoint
        shutil.rmtree(broken / "checkpoints" / f"step-{stop_after}")
    resumed: Any = bandit_run(broken, resume=True)
    assert resumed.resumed.step == 10
    train(resumed)
    assert untimed(broken) == untimed(whole)
    np.testing.assert_array_equal(resumed.policy.table, expected.policy.table)


def test_workers_are_told_of_a_checkpoint_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a Ray cluster have another working directory than the driver."""
    monkeypatch.chdir(tmp_path)
    train(bandit_run(Path("run"), max_steps=10))
    resumed = bandit_run(Path("run"), max_steps=11, resume=True)
    told, load = list[Path](), resumed.policy.load

    async def noted(folder: Path) -> None:
        told.append(folder)
        await load(folder)

    resumed.policy.load = noted  # type: ignore[method-assign]
    train(resumed)
    assert told == [tmp_path / "run" / "checkpoints" / "step-10"]


def test_a_run_that_ends_for_want_of_memory_leaves_the_size_that_may_fit(tmp_path: Path) -> None:
    run = bandit_run(tmp_path, max_steps=10)

    async def update(_: Batch) -> Metrics:
        raise MicrobatchMemoryError("memory ran out on rank 1", next_max_tokens=500)

    run.policy.update = update  # type: ignore[method-assign]
    with pytest.raises(MicrobatchMemoryError):
        train(run)
    setting = run.config.train.max_tokens_per_microbatch
    assert left_limit(tmp_path) == MicrobatchTokens(setting=setting, limit=500)


def test_every_setting_of_sampling_reaches_the_engine(tmp_path: Path) -> None:
    rollout = {"max_new_tokens": 7, "temperature": 0.5, "top_p": 0.8, "top_k": 3, "min_p": 0.1, "stop": ("x",)}
    others = {"prompts_per_step": 2, "samples_per_prompt": 2, "stop_after_answer": True}
    run = bandit_run(tmp_path, rollout=rollout | others)
    run.environment.answer_end = end = AnswerEnd(closing="y")
    sampling = training_sampling(run.config, run.environment)
    assert asdict(sampling) == rollout | {"answer_end": asdict(end), "seed": 0, "exact": False}


def test_seeds_of_the_run_give_other_random_numbers(tmp_path: Path) -> None:
    seeds = []
    for seed in (0, 1):
        run = begun(tmp_path / str(seed), seed=seed, max_steps=1)
        run.engine.seeds.clear()
        step_of(run)
        seeds.append(set(run.engine.seeds))
    assert not seeds[0] & seeds[1]


def test_a_reward_that_is_no_number_is_named(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.environment.score = lambda task, turns: Score(reward=float("nan"), accuracy=0.0)
    with pytest.raises(DataError, match=r"train/\d+: the reward of '[abcd]' is nan; return a finite number"):
        step_of(run)


def test_the_last_checkpoint_is_saved_once(tmp_path: Path) -> None:
    """Saving it again would, for a moment, leave none."""
    run = bandit_run(tmp_path, max_steps=20)
    saved: list[str] = []
    save = run.policy.save

    async def noted(folder: Path) -> None:
        saved.append(folder.name)
        await save(folder)

    run.policy.save = noted  # type: ignore[method-assign]
    train(run)
    assert saved == [".step-0.partial", ".step-10.partial", ".step-20.partial"]


KL_IN_REWARD = {"name": "reward", "estimator": "k1", "coef": 0.1}


def test_a_kl_in_the_reward_keeps_the_policy_near(tmp_path: Path) -> None:
    """The bandit sits at its reference to begin with; a strong KL holds it there, a weak one lets it go."""
    rewards = []
    for coefficient in (3.0, 0.01):
        algorithm = {"kl": KL_IN_REWARD | {"coef": coefficient}, "advantage": "dr_grpo"}
        train(bandit_run(tmp_path / str(coefficient), algorithm=algorithm))
        rewards.append(read_metrics(tmp_path / str(coefficient))[-1]["reward"])
    assert rewards[0] < 0.7 < 0.9 < rewards[1]


def test_the_weight_of_the_kl_moves_towards_its_target_and_survives_a_resume(tmp_path: Path) -> None:
    """From 0 to a KL far above the target: up by 1 + 0.2 * 64 / 640 = 1.02 a step once it is 1.2 times the target."""
    algorithm = {"kl": KL_IN_REWARD | {"controller": {"target": 1e-6, "horizon_samples": 640}}}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(bandit_run(whole, algorithm=algorithm))
    coefficients = [row["kl/coef"] for row in read_metrics(whole)]
    assert coefficients[0] == 0.1
    assert coefficients[1] == pytest.approx(0.1 * 0.98), "at the reference the KL is 0: down by the same"
    ratios = {round(b / a, 6) for a, b in pairwise(coefficients[1:])}
    assert ratios <= {1.02, 0.98}
    assert coefficients[-1] > 0.1
    train(bandit_run(broken, max_steps=10, algorithm=algorithm))
    train(bandit_run(broken, resume=True, algorithm=algorithm))
    assert untimed(broken) == untimed(whole)


class SkippingPolicy(BanditPolicy):
    """Skips every update but those of the steps in `taken`."""

    taken: Collection[int] = ()

    async def update(self, batch: Batch) -> Metrics:
        step = self.updates + 1
        return await super().update(batch) | {"updates_skipped": float(step not in self.taken)}


def test_a_run_all_of_whose_updates_were_skipped_fails_and_may_not_say_that_it_trained(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"all 2 updates were skipped, since .* not finite.*; lower train.learning_"):
        train(run_with(SkippingPolicy(), tmp_path / "all", max_steps=2))
    assert not (tmp_path / "all" / "summary.json").exists()
    for taken in (1, 2):
        policy = SkippingPolicy()
        policy.taken = (taken,)
        assert train(run_with(policy, tmp_path / str(taken), max_steps=2)).steps == 2


def test_values_reach_the_update_and_no_group_is_left_out(tmp_path: Path) -> None:
    batch = trained(tmp_path, algorithm={"name": "ppo"})
    assert len(batch.groups) == 8
    for sample in batch.samples:
        assert sample.returns_T is not None
        np.testing.assert_allclose(sample.returns_T, [sample.reward], rtol=1e-6)  # one action: the reward itself


def test_a_checkpoint_of_another_version_says_what_it_lacks(tmp_path: Path) -> None:
    train(bandit_run(tmp_path, max_steps=20))
    written = tmp_path / "checkpoints" / "step-20" / "state.json"
    state = json.loads(written.read_text())
    del state["curriculum"], state["train_state"]["kl_coef"]
    written.write_text(json.dumps(state))
    write_manifest(written.parent)
    for name in (".step-30.partial", "step-20-best"):  # one that was cut short, and a copy
        (written.parents[1] / name).mkdir()
    latest = Checkpoints(tmp_path, keep=2).latest()
    assert latest is not None
    assert (latest.step, latest.state.get("curriculum")) == (20, None)
    for saved, key in ((latest.state, "curriculum"), (latest.state["train_state"], "kl_coef")):
        with pytest.raises(DataError, match=rf"step-20: this checkpoint has no '{key}', .* or start over"):
            saved[key]
