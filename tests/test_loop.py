"""The loop on fakes: what each stage hands on, what is written down, and that a bandit learns."""

from __future__ import annotations

import json
import signal
from collections.abc import Collection
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fovea.errors import MicrobatchMemoryError, TrainError
from fovea.loop import take_step, train
from fovea.metrics.log import read_metrics
from fovea.run import lifecycle
from fovea.run.checkpoint import Checkpoints, write_manifest
from fovea.run.lifecycle import begin
from fovea.run.microbatches import MicrobatchTokens, left_limit
from fovea.run.sampling import training_sampling
from fovea.run.state import TrainState
from fovea.types import Batch, Metrics
from fovea_gym.errors import DataError
from fovea_gym.types import AnswerEnd, Score
from fovea_gym.utils.event_loop import wait_for
from tests.fakes import BanditEngine, BanditPolicy, bandit_run, run_with
from tests.runs import untimed


def at(step: int) -> TrainState:
    return TrainState(step=step, kl_coef=0.0)


def test_a_bandit_learns(tmp_path: Path) -> None:
    summary = train(bandit_run(tmp_path))
    metrics = read_metrics(tmp_path)
    assert [row["step"] for row in metrics] == list(range(1, 31))
    assert metrics[0]["reward"] < 0.5 < 0.9 < metrics[-1]["reward"]
    assert summary.before is not None
    assert summary.before.accuracy < summary.final.accuracy == 1.0
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 30


def test_the_time_limit_counts_earlier_attempts_and_is_named_as_it_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a supervisor starts it after an hour; the setting was replaced by what was left of it."""
    run = replace(bandit_run(tmp_path, max_hours=1.0), spent_seconds=3600.0)
    said: list[str] = []
    monkeypatch.setattr(run.progress, "print", said.append)
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


def test_a_signal_ends_the_evaluation_behind_a_time_limit_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def finish(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the signal was only noted")

    monkeypatch.setattr(lifecycle, "finish", finish)
    with pytest.raises(SystemExit) as ended:
        train(bandit_run(tmp_path, max_hours=1e-9, evaluate=EVALUATED))
    assert ended.value.code == 128 + signal.SIGTERM
    assert (tmp_path / "checkpoints" / "step-1").is_dir()


def test_each_step_has_the_promised_metrics(tmp_path: Path) -> None:
    train(bandit_run(tmp_path, max_steps=2))
    promised = "step reward loss grad_norm response_tokens_mean tokens_per_second seconds/rollout seconds/update"
    for row in read_metrics(tmp_path):
        assert set(promised.split()) <= row.keys()


def test_the_engine_draws_from_the_newest_weights_and_never_twice_with_one_seed(tmp_path: Path) -> None:
    run = bandit_run(tmp_path)
    wait_for(begin(run))
    engine, policy = run.engine, run.policy
    assert isinstance(engine, BanditEngine)
    assert isinstance(policy, BanditPolicy)
    engine.seeds.clear()
    for step in range(3):
        groups, _ = wait_for(take_step(run, at(step)))
        assert {
            turn.completion.version for group in groups for episode in group.episodes for turn in episode.tokens
        } == {step}
        np.testing.assert_array_equal(engine.table, policy.table)
    assert len(set(engine.seeds)) == 3 * 8


@pytest.mark.parametrize(("kl", "trained", "skipped"), [(None, 0, 8), ({"coef": 0.1}, 8, 0)])
def test_groups_without_signal_are_skipped_and_counted_unless_a_kl_term_acts_on_them(
    kl: object, trained: int, skipped: int, tmp_path: Path
) -> None:
    run = bandit_run(tmp_path, algorithm={"kl": kl})
    wait_for(begin(run))
    run.policy.table[:] = 50 * np.eye(4)  # type: ignore[attr-defined]
    wait_for(run.weight_sync.sync(0))
    _, metrics = wait_for(take_step(run, at(0)))
    assert len(run.policy.batches[0].groups) == trained  # type: ignore[attr-defined]
    counts = [metrics[f"groups/{name}"] for name in ("with_signal", "without_signal", "skipped")]
    assert counts == [0, 8, skipped]


def test_old_and_reference_logprobs_only_where_needed(tmp_path: Path) -> None:
    on_policy = bandit_run(tmp_path / "a", max_steps=1)
    train(on_policy)
    epochs = bandit_run(tmp_path / "e", max_steps=1, algorithm={"ppo_epochs": 2})
    train(epochs)
    off_policy = bandit_run(tmp_path / "b", max_steps=1, algorithm={"minibatches": 2, "kl": {"coef": 0.1}})
    train(off_policy)
    (first,), (second,) = on_policy.policy.batches, off_policy.policy.batches  # type: ignore[attr-defined]
    (of_epochs,) = epochs.policy.batches  # type: ignore[attr-defined]
    assert all(s.old_logprobs_T is None for group in of_epochs.groups for s in group.samples), "the first epoch's own"
    for group in first.groups:
        assert all(s.old_logprobs_T is None and s.reference_logprobs_T is None for s in group.samples)
    for group in second.groups:
        for sample in group.samples:
            np.testing.assert_allclose(sample.old_logprobs_T, sample.rollout_logprobs_T, rtol=1e-6)
            np.testing.assert_allclose(sample.reference_logprobs_T, -np.log(4), rtol=1e-6)


@pytest.mark.parametrize(
    ("trunk", "minibatches", "scored"), [("shared", 1, True), ("separate", 1, False), ("separate", 2, True)]
)
def test_a_critic_of_its_own_asks_the_policy_only_where_the_first_epoch_has_several_steps(
    tmp_path: Path, trunk: str, minibatches: int, scored: bool
) -> None:
    """On the policy's trunk log-probs come with the values."""
    run = bandit_run(
        tmp_path,
        max_steps=1,
        algorithm={"name": "ppo", "minibatches": minibatches, "advantage": {"critic": {"trunk": trunk}}},
    )
    train(run)
    (batch,) = run.policy.batches  # type: ignore[attr-defined]
    assert all(sample.values_T is not None for sample in batch.samples)
    assert [sample.old_logprobs_T is not None for sample in batch.samples] == [scored] * len(batch.samples)


@pytest.mark.parametrize("stop_after", [10, 17])
def test_a_resumed_run_equals_one_never_stopped(tmp_path: Path, stop_after: int) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = bandit_run(whole)
    train(expected)
    train(bandit_run(broken, max_steps=stop_after))
    for later in (broken / "checkpoints").glob(f"step-{stop_after}"):
        if stop_after % 10:  # the end of the first part also saves: go back to the last regular checkpoint
            for file in later.iterdir():
                file.unlink()
            later.rmdir()
    resumed = bandit_run(broken, resume=True)
    assert resumed.resumed is not None
    assert resumed.resumed.step == 10
    train(resumed)
    assert untimed(broken) == untimed(whole)
    np.testing.assert_array_equal(resumed.policy.table, expected.policy.table)  # type: ignore[attr-defined]


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


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    train(bandit_run(tmp_path))
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["step-20", "step-30"]


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
        run = bandit_run(tmp_path / str(seed), seed=seed, max_steps=1)
        wait_for(begin(run))
        run.engine.seeds.clear()  # type: ignore[attr-defined]
        wait_for(take_step(run, at(0)))
        seeds.append(set(run.engine.seeds))  # type: ignore[attr-defined]
    assert not seeds[0] & seeds[1]


def test_a_reward_that_is_no_number_is_named(tmp_path: Path) -> None:
    run = bandit_run(tmp_path)
    wait_for(begin(run))
    run.environment.score = lambda task, turns: Score(reward=float("nan"), accuracy=0.0)  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"train/\d+: the reward of '[abcd]' is nan; return a finite number"):
        wait_for(take_step(run, at(0)))


def test_a_checkpoint_cut_short_or_copied_is_not_taken_for_one(tmp_path: Path) -> None:
    train(bandit_run(tmp_path, max_steps=20))
    folder = tmp_path / "checkpoints"
    (folder / ".step-30.partial").mkdir()
    (folder / "step-20-best").mkdir()
    latest = Checkpoints(tmp_path, keep=2).latest()
    assert latest is not None
    assert latest.step == 20


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
    ends = {}
    for coefficient in (0.01, 3.0):
        algorithm = {"kl": KL_IN_REWARD | {"coef": coefficient}, "advantage": "dr_grpo"}
        ends[coefficient] = train(bandit_run(tmp_path / str(coefficient), algorithm=algorithm))
    rewards = {c: read_metrics(tmp_path / str(c))[-1]["reward"] for c in ends}
    assert rewards[3.0] < 0.7 < 0.9 < rewards[0.01]


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
    with pytest.raises(
        TrainError, match=r"all 2 updates were skipped, since .* not finite.*; lower train.learning_rate"
    ):
        train(run_with(SkippingPolicy(), tmp_path / "all", max_steps=2))
    assert not (tmp_path / "all" / "summary.json").exists()
    for taken in (1, 2):
        policy = SkippingPolicy()
        policy.taken = (taken,)
        assert train(run_with(policy, tmp_path / str(taken), max_steps=2)).steps == 2


def test_values_reach_the_update_and_no_group_is_left_out(tmp_path: Path) -> None:
    run = bandit_run(tmp_path, max_steps=1, algorithm={"name": "ppo"})
    train(run)
    (batch,) = run.policy.batches  # type: ignore[attr-defined]
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
    latest = Checkpoints(tmp_path, keep=2).latest()
    assert latest is not None
    assert latest.state.get("curriculum") is None
    for saved, key in ((latest.state, "curriculum"), (latest.state["train_state"], "kl_coef")):
        with pytest.raises(DataError, match=rf"step-20: this checkpoint has no '{key}', .* or start over"):
            saved[key]
