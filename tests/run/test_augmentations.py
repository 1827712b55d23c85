"""Runs with noisy and masked pictures: log-probs are of the view that each is said to be of."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fovea.config.loading import load_config
from fovea.data.prompt_source import PromptedTask
from fovea.run.augmentations import in_one_turn, with_augmentations
from fovea.run.context import Run
from fovea.run.lifecycle import begin
from fovea.run.rollout_step import roll_out
from fovea.samples import make_batch
from fovea.train.base import Needs
from fovea.types import Batch, Prompt, Sample
from fovea.wiring.run import build
from fovea_gym.errors import ConfigError
from fovea_gym.utils.event_loop import wait_for
from gym_tests.bandit import BanditEnvironment
from tests.cluster.ray_environment import own_ray
from tests.cluster.torchrun_runs import compare, settings
from tests.runs import QUICK, ROOT, command, fovea_here, train_here, untimed

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
    assert [[sample.is_noisy for sample in group.samples] for group in batch.groups] == [
        [False, False, False, True]
    ] * 3
    with_logprobs = wait_for(run.policy.compute_logprobs(batch, Needs.of(run.config.algorithm))).samples
    on_noisy = scored(run, batch, [view.noisy for view in augmentation])
    on_masked = scored(run, batch, [view.masked for view in augmentation])
    for sample, noisy, masked in zip(with_logprobs, on_noisy, on_masked, strict=True):
        same, other = (noisy, sample) if sample.is_noisy else (sample, noisy)
        np.testing.assert_allclose(same.old_logprobs_T, sample.rollout_logprobs_T, atol=SAME)
        assert np.abs(other.old_logprobs_T - sample.rollout_logprobs_T).max() > OTHER
        np.testing.assert_allclose(sample.masked_logprobs_T, masked.old_logprobs_T, atol=SAME)
        assert np.abs(sample.masked_logprobs_T - sample.old_logprobs_T).max() > OTHER
    alone = [view.noisy.images[0].key for view in views_of(run, 0)]  # type: ignore[union-attr]
    run.stream.source.render_ahead(2)
    by_step = [[view.noisy.images[0].key for view in views_of(run, step)] for step in (0, 1)]  # type: ignore[union-attr]
    assert by_step[0] == alone, "threads change nothing"
    assert len({*by_step[0], *by_step[1]}) == 6, "another step has other noise"
    wait_for(run.policy.close())
    run.held.close()


def test_a_run_with_views_ends_and_two_are_the_same(tmp_path: Path) -> None:
    found = [train_here("shapes", tmp_path / name, *SHORT, *BOTH, "parity.prompts=2") for name in ("a", "b")]
    assert untimed(tmp_path / "a") == untimed(tmp_path / "b")
    assert all(row["augmentation/noise_step"] == 500 for row in found[0])
    assert all(row["mismatch/max"] < SAME for row in found[0])


@pytest.mark.slow
def test_an_engine_of_another_process_draws_on_the_same_views(tmp_path: Path) -> None:
    """A learner and an engine that Ray starts, against one process."""
    pytest.importorskip("ray", reason="needs the extra ray")
    by_ray = ("cluster.gpus_per_node=2", "cluster.placement=disaggregated", "cluster.rollout_gpus=1")
    words = settings("recipes/shapes.yaml", tmp_path / "ray", *SAMPLES, *BOTH, *by_ray)
    with own_ray() as own:
        done = subprocess.run(
            command("train", *words), cwd=ROOT, env=own, capture_output=True, text=True, timeout=300, check=False
        )
    assert done.returncode == 0, done.stderr + done.stdout
    fovea_here("train", *settings("recipes/shapes.yaml", tmp_path / "one", *SAMPLES, *BOTH))
    compare(tmp_path / "one", tmp_path / "ray")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["rollout.augmentation={}", "algorithm.importance_sampling_fix=true"], "importance_sampling_fix"),
        (["rollout.augmentation={}", "algorithm.old_logprobs=engine"], "old_logprobs=engine"),
        (["rollout.augmentation.share=0.1", "rollout.samples_per_prompt=4"], "rollout.augmentation.share=0.1"),
        (["algorithm.augmentation=vppo", "rollout.max_staleness_steps=1"], "max_staleness_steps=1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_do_not_go_with_views_are_refused(settings: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config([ROOT / "recipes/shapes.yaml"], settings)


def test_environments_of_several_turns_are_refused() -> None:
    environment = BanditEnvironment()
    environment.max_turns = 2
    config = load_config([ROOT / "recipes/shapes.yaml"], ["rollout.augmentation={}"])
    with pytest.raises(ConfigError, match="later turns"):
        in_one_turn(config, environment)
