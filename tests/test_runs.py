"""Whole runs as a user starts them: the recipes for a few steps, kill -9 and resume, real Geometry3K rows."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fovea.config.algorithm import DEFAULTS_OF
from fovea.metrics.log import read_metrics
from fovea.metrics.names import undefined
from fovea.run.checkpoint import Checkpoints
from fovea_gym.processes.ending import running
from tests.runs import (
    ROOT,
    SMALL,
    environment,
    final_weights,
    kill_when_steps_are_taken,
    train_here,
    train_shapes,
    untimed,
)
from tests.tiny_models import DENSE_FAMILIES, FAMILIES
from tests.warm import WarmProcess, run_warm

GEO3K = ROOT / ".." / "shared" / "data" / "geo3k"
LACKS_GEO3K = "needs Geometry3K rows in ../shared/data/geo3k, which are not part of the project"
HIDDEN_BY_PYTHON = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)


WIDE = ["model.tiny.hidden_size=256", "model.tiny.num_heads=4", "model.tiny.num_kv_heads=2"]
"""Wide enough for packed decoding weights and for updates that look up their rollout's linear outputs."""


def kill_amid_a_save(arguments: Sequence[str], run_dir: Path, step: int) -> None:
    """SIGKILL while the files of this step's checkpoint are written, at least one of them and not all."""
    process = WarmProcess(["fovea", *arguments], environment(), stdout=subprocess.DEVNULL)
    partial = run_dir / "checkpoints" / f".step-{step}.partial"
    try:
        deadline = time.monotonic() + 120
        while not any(partial.glob("*/*")):
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline, "the run took too long to get going"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert partial.is_dir(), "it was complete when the signal came"
    assert not (partial / "manifest.json").exists()


@pytest.mark.kill
def test_kill_9_amid_a_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = ["max_steps=14", "checkpoint.every_steps=7", "evaluate.every_steps=7", *WIDE]
    train_shapes(whole, *settings, "checkpoint.background=false")
    kill_amid_a_save(["train", "recipes/shapes.yaml", f"run_dir={killed}", *SMALL, *settings], killed, step=7)
    resumed = train_shapes(killed, *settings, "resume=auto")
    assert "resumed at step 0" in resumed.stdout
    assert untimed(killed) == untimed(whole)
    assert final_weights(killed, 14) == final_weights(whole, 14)
    assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == ["step-14", "step-7"]


@pytest.mark.kill
@pytest.mark.parametrize(
    "extra",
    [
        pytest.param([], id="full", marks=pytest.mark.smoke),
        pytest.param(["model.freeze_vision_tower=true", "threads=2"], id="cached features"),
    ],
)
def test_kill_9_and_resume_equals_never_stopped(extra: list[str], tmp_path: Path) -> None:
    """Weights byte for byte, metrics digit for digit."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = ["max_steps=24", "checkpoint.every_steps=5", "data.kind_weights.counting=3", *extra]
    train_shapes(whole, *settings)
    arguments = ["train", "recipes/shapes.yaml", f"run_dir={killed}", *SMALL, *settings]
    kill_when_steps_are_taken(arguments, killed, steps=8)
    taken = len(read_metrics(killed))
    assert 8 <= taken < 24
    saved = Checkpoints(killed, keep=1).newest
    assert saved is not None
    resumed = train_shapes(killed, *settings, "resume=auto")
    # that of the last fifth step, unless it was being written
    assert f"resumed at step {saved.name.removeprefix('step-')} " in resumed.stdout
    assert untimed(killed) == untimed(whole)
    assert final_weights(killed, 24) == final_weights(whole, 24)


def test_a_run_folder_holds_what_is_promised(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = train_shapes(run_dir, "max_steps=6", "evaluate.every_steps=3")
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "report.html"):
        assert (run_dir / name).stat().st_size > 0, name
    assert json.loads((run_dir / "parity.json").read_text())["passed"]
    assert list((run_dir / "tensorboard").iterdir())
    samples = sorted(path.name for path in (run_dir / "samples").glob("*.jsonl"))
    assert samples == ["index.jsonl", "step-000001.jsonl", "step-000005.jsonl"]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["accuracy"].keys() == {"before", "warmup", "final"}
    assert summary["by_type"].keys() == {"counting", "colour", "shape", "existence"}
    assert (sum(kind["n"] for kind in summary["by_type"].values()), summary["duplicates_across_splits"]) == (16, 0)
    assert summary["seconds"]["total"] >= summary["seconds"]["warmup"] + summary["seconds"]["rl"] > 0
    assert [row["step"] for row in read_metrics(run_dir) if "accuracy/dev" in row] == [3, 6]
    assert "shuffled images" in done.stdout


KL = "algorithm.kl.coef=0.01"
FIXED_ROWS = ("train.enable_dynamic_batch_size=false", "train.groups_per_microbatch=2")


@pytest.mark.parametrize(
    "settings",
    [
        *([f"model.tiny.family={family}"] for family in FAMILIES),
        ["model.lora.rank=4"],
        ["model.freeze_vision_tower=true", "train.gradient_checkpointing=selective"],
        [KL, "algorithm.ppo_epochs=2", "algorithm.minibatches=2", "train.max_tokens_per_microbatch=150"],
        ["model.lora.rank=4", KL, "rollout.top_p=0.9", "rollout.top_k=20"],
        ["warmup=null", "environment.level=3", "rollout.engine.max_batch_tokens=200"],
        ["model.freeze_vision_tower=true", "model.feature_cache_gib=0", KL, *FIXED_ROWS],
    ],
    ids=" ".join,
)
def test_every_setting_takes_three_steps(settings: list[str], tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    small = [x for x in SMALL if not (x.startswith("warmup.") and "warmup=null" in settings)]
    rows = train_here("shapes", tmp_path / "run", *small, "max_steps=3", *settings)
    assert len(rows) == 3
    assert undefined(key for row in rows for key in row) == []
    assert [str(x) for x in recwarn if not issubclass(x.category, HIDDEN_BY_PYTHON)] == []


@pytest.mark.parametrize("name", DEFAULTS_OF)
def test_every_algorithm_runs_from_the_demo_recipe(name: str, tmp_path: Path) -> None:
    rows = train_here("shapes", tmp_path / "run", *SMALL, "max_steps=3", f"algorithm.name={name}")
    assert [row["updates_skipped"] for row in rows] == [0, 0, 0]
    assert ("explained_variance" in rows[-1]) == (name == "ppo")
    assert ("kl/reward" in rows[-1]) == (name in ("rloo", "reinforce++"))
    assert ("dynamic_sampling/batches" in rows[-1]) == (name == "dapo")


@pytest.mark.parametrize(
    ("family", "trunk"),
    [
        *((family, trunk) for family in DENSE_FAMILIES for trunk in ("shared", "separate")),
        ("qwen3_vl_moe", "shared"),
        ("qwen3_5", "shared"),
    ],
)
def test_the_ppo_recipe_runs_for_every_family(family: str, trunk: str, tmp_path: Path) -> None:
    critic = [f"algorithm.advantage.critic.{x}" for x in (f"trunk={trunk}", "warmup_steps=1")]
    words = [*SMALL, "max_steps=3", f"model.tiny.family={family}", *critic]
    rows = train_here("shapes_ppo", tmp_path / "run", *words)
    assert all(np.isfinite(list(row.values())).all() for row in rows)


@pytest.mark.skipif(not GEO3K.is_dir(), reason=LACKS_GEO3K)
def test_two_grpo_steps_on_real_geometry(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    files = [f"environment.{split}_files=[{GEO3K / f'fixture_{split}.parquet'}]" for split in ("train", "test")]
    model = ["model.path=null", "model.tiny={}", "model.dtype=float32", "model.max_pixels=50000"]
    rollout = ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.max_new_tokens=16"]
    algorithm = ["algorithm.max_groups_without_signal=4", "algorithm.entropy_coef=0.01"]
    sizes = ["max_steps=2", "environment.dev_files=null", "evaluate.test_size=8"]
    rows = train_here("geo3k", run_dir, *files, *model, *rollout, *algorithm, *sizes)
    assert [row["grad_norm"] > 0 for row in rows] == [True, True]
    assert all(row["reward"] == row["accuracy"] == row["reward/answer"] for row in rows), "binary, as the recipe says"
    assert json.loads((run_dir / "summary.json").read_text())["by_type"]["all"]["n"] == 8


GAME = """\
import os, random, signal, subprocess, time
from pathlib import Path

from fovea.metrics.log import read_metrics
from fovea.processes.session_processes import session_environment
from fovea.run.run_dir import newest_step
from fovea_gym.types import Message, Score, Task

HERE = Path(__file__).parent

class Game:
    def __init__(self, seed):
        self.random = random.Random(seed)
        # without this run's pipes: whoever reads them would wait for this process after the run has been killed
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(["sleep", "600"], env=session_environment(), start_new_session=True, **quiet)

    def reply(self, turns):
        death = HERE / "death"
        if death.exists() and len(read_metrics(HERE / "killed")) >= 2:
            while newest_step(HERE / "killed") < 2:  # it is written beside the next step
                time.sleep(0.01)
            death.rename(HERE / str(self.process.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(random.uniform(0, 0.02))
        return [Message(role="user", parts=(str(self.random.randint(1, 9)),))]

    def score(self, turns):
        return Score(reward=self.random.random() + len(turns[-1].text) / 32, accuracy=0.0)

    def close(self):
        self.process.kill()
        self.process.wait()

class Games:
    max_turns = 2

    def tasks(self, split):
        return [Task(id=f"{split}/{number}", question="Guess.", answer="5") for number in range(16)]

    def prompt(self, task):
        return [Message(role="user", parts=(f"{task.question} {task.id}",))]

    def open(self, task, seed):
        return Game(seed)

    def target(self, task):
        return task.answer
"""
RECIPE = """\
model: {tiny: {}}
max_steps: 4
checkpoint: {every_steps: 2}
rollout: {prompts_per_step: 2, samples_per_prompt: 2, max_new_tokens: 4}
evaluate: {image_controls: false, dev_size: 2}
parity: {prompts: 0}
log: {tensorboard: false}
"""


@pytest.mark.kill
def test_a_run_killed_amid_an_episode_leaves_no_process_and_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    (tmp_path / "games.py").write_text(GAME)
    (tmp_path / "games.yaml").write_text(RECIPE)
    game = f"environment={{name: own, file: '{tmp_path / 'games.py'}:Games', session: {{max_concurrent: 2}}}}"
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def train(run_dir: Path, *settings: str) -> int:
        command = ["fovea", "train", str(tmp_path / "games.yaml"), f"run_dir={run_dir}", game, *settings]
        return run_warm(command, environment(), timeout=600).returncode

    assert train(whole) == 0
    (tmp_path / "death").touch()
    assert train(killed) == -signal.SIGKILL
    assert train(killed, "resume=auto") == 0
    (left,) = (int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
    assert left not in {process.pid for process in running()}
    assert untimed(killed) == untimed(whole)
    assert final_weights(killed, 4) == final_weights(whole, 4)
