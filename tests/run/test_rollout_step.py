"""A step's rollouts: dynamic sampling, views of pictures, and what is recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fovea.config.loading import load_config
from fovea.data.prompt_source import PromptedTask
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.report.samples import read_step, sample_steps
from fovea.run.augmentations import in_one_turn, with_augmentations
from fovea.run.context import Run
from fovea.run.lifecycle import begin
from fovea.run.rollout_step import StepRollout, roll_out
from fovea.samples import make_batch
from fovea.train.base import Needs
from fovea.types import Batch, Prompt, Sample
from fovea.wiring.run import build
from fovea_gym.errors import ConfigError
from fovea_gym.types import Message, Score, Task, Turn
from fovea_gym.utils.event_loop import wait_for
from gym_tests.bandit import BanditEnvironment, graded
from gym_tests.tables import table
from tests.cluster.ray_environment import own_ray
from tests.cluster.torchrun_runs import compare, settings
from tests.fakes import bandit_run
from tests.runs import QUICK, ROOT, command, fovea_here, run_program, train_here, untimed

DYNAMIC = {"dynamic_sampling": {"max_gen_batches": 4}}


class FormatOnly(BanditEnvironment):
    def score(self, task, turns) -> Score:  # type: ignore[no-untyped-def]
        right = super().score(task, turns).accuracy
        return Score(reward=right + 0.1 * (turns[-1].text == "b"), accuracy=0.0)


def drawn(folder: Path, *, sure: float = 0.0, environment: BanditEnvironment | None = None) -> StepRollout:
    """`sure`: preference of the policy for the right answer."""
    run = bandit_run(folder, algorithm=DYNAMIC)
    if environment is not None:
        run = replace(run, stream=replace(run.stream, environment=environment, grading=graded(environment)))
    wait_for(begin(run))
    run.policy.table[:] = sure * np.eye(4)  # type: ignore[attr-defined]
    wait_for(run.weight_sync.sync(0))
    run.engine.seeds.clear()  # type: ignore[attr-defined]
    result = wait_for(roll_out(run.engine, run.stream, run.config, step=0, phases=run.phases))
    assert len(set(run.engine.seeds)) == len(result.groups), "no two groups are drawn with the same numbers"  # type: ignore[attr-defined]
    return result


def test_a_step_is_filled_with_groups_that_differ(tmp_path: Path) -> None:
    result = drawn(tmp_path, sure=4.0)
    accuracies = {id(group): {each.score.accuracy for each in group.episodes} for group in result.groups}
    assert len(result.to_train) == 8
    assert all(accuracies[id(group)] == {0.0, 1.0} for group in result.to_train)
    batches = result.metrics["dynamic_sampling/batches"]
    assert 1 < batches <= 4
    assert len(result.groups) == 8 * batches
    dropped, left_over = (result.metrics[f"dynamic_sampling/groups_{name}"] for name in ("dropped", "left_over"))
    assert dropped == sum(len(accuracies[id(group)]) == 1 for group in result.groups)
    assert dropped + left_over == len(result.groups) - 8
    parted = sorted(map(id, result.to_train + result.dropped))
    assert parted == sorted(map(id, result.groups)), "every group is trained on or dropped, once"
    assert result.metrics["dynamic_sampling/groups_missing"] == 0
    # accuracy decides, and not the reward
    assert drawn(tmp_path / "format", environment=FormatOnly()).to_train == []


def test_a_run_with_it_learns_and_compares_dropped_groups_with_the_engine(tmp_path: Path) -> None:
    """In its last steps nothing is left to train on."""
    run = bandit_run(tmp_path, algorithm=DYNAMIC)
    assert train(run).final.accuracy == 1.0
    rows, batches = read_metrics(tmp_path), run.policy.batches  # type: ignore[attr-defined]
    assert [max(row[f"dynamic_sampling/{name}"] for row in rows) for name in ("batches", "groups_missing")] == [4, 8]
    assert all(row["groups/without_signal"] == 0 for row in rows)
    for row, batch in zip(rows, batches, strict=True):
        names = ("dropped", "left_over")
        assert len(batch.left_out) == sum(row[f"dynamic_sampling/groups_{name}"] for name in names)
        assert all(sample.weight == 0 for group in batch.left_out for sample in group.samples)
    assert any(batch.left_out for batch in batches)


PER_GROUP = 4


class ByList(BanditEnvironment):
    """Of each group in turn, whether its answers are to differ."""

    def __init__(self, differ: Sequence[bool]) -> None:
        self._scores: Iterator[float] = iter([float(d and n == 0) for d in differ for n in range(PER_GROUP)])

    def score(self, task: Task, turns: Sequence[Turn]) -> Score:
        accuracy = next(self._scores)
        return Score(reward=accuracy, accuracy=accuracy)


@pytest.mark.parametrize(
    ("differ", "max_gen_batches", "expected"),
    [
        # 3 of 4 differ, then 3 of 4 again: two more than wanted
        ([True, True, False, True, False, True, True, True], 3, (2, 2, 2, 0)),
        # 1 of 4 differs, then all 4: one more than wanted, and 3 agreed
        ([False, False, True, False, True, True, True, True], 3, (2, 3, 1, 0)),
        ([True] * 4, 3, (1, 0, 0, 0)),
        ([True, False, False, False] * 2, 2, (2, 6, 0, 2)),
    ],
    ids=["left over", "dropped", "full at once", "missing"],
)
def test_what_agrees_is_dropped_and_what_is_over_is_left_over(
    differ: Sequence[bool], max_gen_batches: int, expected: tuple[int, ...], tmp_path: Path
) -> None:
    run = bandit_run(
        tmp_path,
        algorithm={"dynamic_sampling": {"max_gen_batches": max_gen_batches}},
        rollout={"prompts_per_step": 4, "samples_per_prompt": PER_GROUP, "max_new_tokens": 1},
    )
    environment = ByList(differ)
    run = replace(run, stream=replace(run.stream, environment=environment, grading=graded(environment)))
    wait_for(run.weight_sync.sync(0))
    metrics = wait_for(roll_out(run.engine, run.stream, run.config, step=0, phases=run.phases)).metrics
    names = ("batches", "groups_dropped", "groups_left_over", "groups_missing")
    assert metrics == {f"dynamic_sampling/{name}": value for name, value in zip(names, expected, strict=True)}


PER_STEP = {"prompts_per_step": 3, "samples_per_prompt": 4, "max_new_tokens": 1}


def test_a_record_has_what_the_update_makes_of_every_token(tmp_path: Path) -> None:
    rollout = {**PER_STEP, "prompts_per_step": 5}
    run = bandit_run(tmp_path / "run", max_steps=2, rollout=rollout, log={"samples_every_steps": 1})
    train(replace(run, token_text=lambda index: f"<{index}>"))
    assert sample_steps(tmp_path / "run") == [1, 2]
    records = read_step(tmp_path / "run", 2)
    assert [len(record.answers) for record in records] == [4, 4, 4, 4], "all answers of the first groups"
    of_update = [sample for group in run.policy.batches[1].groups for sample in group.samples]
    found = 0
    for answer in (answer for record in records for answer in record.answers):
        (turn,) = answer.turns
        assert turn.tokens is not None
        assert turn.text == answer.text
        assert turn.version == 1, "the weight sync after the first update"
        # the bandit's engine draws with the weights of its policy
        assert turn.tokens.trainer_logprobs == pytest.approx(turn.tokens.engine_logprobs, abs=2e-4)
        if turn.tokens.advantages:
            found += 1
            drawn_so = [each for each in of_update if turn.tokens.pieces == (f"<{each.token_ids_T[0]}>",)]
            same = [each for each in drawn_so if turn.tokens.advantages == pytest.approx(each.advantages_T, abs=1e-4)]
            assert same[0].reward == answer.reward
    assert found


def test_what_its_length_took_from_the_reward_of_an_answer_is_a_part(tmp_path: Path) -> None:
    overlong = {"buffer_frac": 1.0, "penalty_factor": 0.5}
    train(bandit_run(tmp_path / "run", max_steps=1, rollout=PER_STEP, algorithm={"overlong": overlong}))
    train(bandit_run(tmp_path / "none", max_steps=1, rollout=PER_STEP))
    parts = [answer.parts for record in read_step(tmp_path / "run", 1) for answer in record.answers]
    assert {each["algorithm.overlong"] for each in parts} == {-0.5}, "one token of one"
    assert "algorithm.overlong" not in read_step(tmp_path / "none", 1)[0].answers[0].parts


def test_texts_and_names_of_tools_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = Message(role="tool", tool="t" * 200, parts=("x" * 60_000,), failed=True)
    prompt = BanditEnvironment.prompt
    monkeypatch.setattr(BanditEnvironment, "prompt", lambda *given: [*prompt(*given), long])
    train(bandit_run(tmp_path / "run", max_steps=1, rollout=PER_STEP))
    asked, kept = read_step(tmp_path / "run", 1)[0].messages
    said = [(each.role, each.tool, each.failed) for each in (asked, kept)]
    assert said == [("user", "", False), ("tool", "t" * 80, True)]
    assert kept.parts == ("x" * 50_000 + "... (10,000 more characters)",)


def test_recording_changes_nothing_of_the_update(tmp_path: Path) -> None:
    tables = []
    for interval, recorded in ((1, [1, 2, 3, 4]), (3, [1, 3])):
        run = bandit_run(tmp_path / str(interval), max_steps=4, log={"samples_every_steps": interval})
        train(run)
        assert sample_steps(run.folder) == recorded
        assert all(sample.old_logprobs_T is None for batch in run.policy.batches for sample in batch.samples)
        tables.append(run.policy.table.tolist())
    assert tables[0] == tables[1]


SHORT = [
    *(x for x in QUICK if not x.startswith(("rollout.", "log.samples"))),
    *("rollout.prompts_per_step=3", "rollout.samples_per_prompt=4", "max_steps=2", "evaluate.before_training=false"),
    *("evaluate.test_size=4", "log.samples_every_steps=1"),
]
SAMPLES = ["rollout.samples_per_prompt=4", "algorithm.augmentation.mask_patch_px=8"]
BOTH = ["rollout.augmentation.share=0.25", "algorithm.augmentation=vppo", "algorithm.minibatches=2"]
SAME, OTHER = 1e-5, 1e-3


def views_of(run: Run, step: int) -> list[PromptedTask]:
    order = run.stream.order.state()
    prompted = run.stream.source.take(run.stream.order, 3)
    run.stream.order.restore(order)
    return with_augmentations(run.stream.source, prompted, run.config, step=step, num_before=0)


def noise(run: Run, step: int) -> list[str]:
    """The keys of the noisy pictures of a step."""
    return [view.noisy.images[0].key for view in views_of(run, step)]  # type: ignore[union-attr]


def scored(run: Run, batch: Batch, prompts: list[Prompt | None]) -> tuple[Sample, ...]:
    """The samples with the trainer's log-probs on these prompts as old ones."""
    groups = zip(batch.groups, prompts, strict=True)
    on_prompts = Batch(groups=tuple(replace(group, prompt=prompt, masked=None) for group, prompt in groups))
    return wait_for(run.policy.compute_logprobs(on_prompts, Needs(old_logprobs=True))).samples


def test_every_log_prob_is_of_the_view_that_it_is_said_to_be_of(tmp_path: Path) -> None:
    run = build(load_config([ROOT / "recipes/shapes.yaml"], [*SHORT, *BOTH, f"run_dir={tmp_path}"]))
    wait_for(begin(run))
    augmentation = views_of(run, 0)
    groups = wait_for(roll_out(run.engine, run.stream, run.config, step=0, phases=run.phases)).groups
    batch, _ = make_batch(groups, run.config.algorithm, max_new_tokens=8)
    assert [sample.is_noisy for sample in batch.samples] == [False, False, False, True] * 3
    with_logprobs = wait_for(run.policy.compute_logprobs(batch, Needs.of(run.config.algorithm))).samples
    on_noisy = scored(run, batch, [view.noisy for view in augmentation])
    on_masked = scored(run, batch, [view.masked for view in augmentation])
    for sample, noisy, masked in zip(with_logprobs, on_noisy, on_masked, strict=True):
        same, other = (noisy, sample) if sample.is_noisy else (sample, noisy)
        np.testing.assert_allclose(same.old_logprobs_T, sample.rollout_logprobs_T, atol=SAME)
        assert np.abs(other.old_logprobs_T - sample.rollout_logprobs_T).max() > OTHER
        np.testing.assert_allclose(sample.masked_logprobs_T, masked.old_logprobs_T, atol=SAME)
        assert np.abs(sample.masked_logprobs_T - sample.old_logprobs_T).max() > OTHER
    alone = noise(run, 0)
    run.stream.source.render_ahead(2)
    by_step = [noise(run, step) for step in (0, 1)]
    assert by_step[0] == alone, "threads change nothing"
    assert len({*by_step[0], *by_step[1]}) == 6, "another step has other noise"
    wait_for(run.policy.close())
    run.held.close()


def test_a_run_with_views_ends_and_two_are_the_same(tmp_path: Path) -> None:
    found = [train_here("shapes", tmp_path / name, *SHORT, *BOTH, "parity.prompts=2") for name in ("a", "b")]
    assert untimed(tmp_path / "a") == untimed(tmp_path / "b")
    assert all(row["augmentation/noise_step"] == 500 and row["mismatch/max"] < SAME for row in found[0])


@pytest.mark.slow
def test_an_engine_of_another_process_draws_on_the_same_views(tmp_path: Path) -> None:
    """A learner and an engine that Ray starts, against one process."""
    pytest.importorskip("ray", reason="needs the extra ray")
    by_ray = ("cluster.gpus_per_node=2", "cluster.placement=disaggregated", "cluster.rollout_gpus=1")
    words = settings("recipes/shapes.yaml", tmp_path / "ray", *SAMPLES, *BOTH, *by_ray)
    with own_ray() as own:
        done = run_program(command("train", *words), own, seconds=300)
    assert done.returncode == 0, done.stderr + done.stdout
    fovea_here("train", *settings("recipes/shapes.yaml", tmp_path / "one", *SAMPLES, *BOTH))
    compare(tmp_path / "one", tmp_path / "ray")


@table(
    ("settings", "named"),
    [
        (["rollout.augmentation={}", "algorithm.importance_sampling_fix=true"], "importance_sampling_fix"),
        (["rollout.augmentation={}", "algorithm.old_logprobs=engine"], "old_logprobs=engine"),
        (["rollout.augmentation.share=0.1", "rollout.samples_per_prompt=4"], "rollout.augmentation.share=0.1"),
        (["algorithm.augmentation=vppo", "rollout.max_staleness_steps=1"], "max_staleness_steps=1"),
    ],
)
def test_settings_that_do_not_go_with_views_are_refused(settings: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config([ROOT / "recipes/shapes.yaml"], settings)


def test_environments_of_several_turns_are_refused() -> None:
    environment = BanditEnvironment()
    environment.max_turns = 2
    with pytest.raises(ConfigError, match="later turns"):
        in_one_turn(load_config([ROOT / "recipes/shapes.yaml"], ["rollout.augmentation={}"]), environment)
