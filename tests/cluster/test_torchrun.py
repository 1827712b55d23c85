"""Runs in two processes started by torchrun, against the same runs in one."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from fovea.cluster.torchrun import join
from fovea.metrics.log import read_metrics
from fovea.run.run_dir import newest_step
from tests.cluster.torchrun_runs import (
    LONG,
    LONG_STEPS,
    STEPS,
    assert_all_end,
    compare,
    compare_weights,
    processes_of,
    rank_of,
    settings,
    start_on_two,
    starting_on_two,
    train_by_torchrun,
    train_on,
    train_on_two,
    without_transfer,
)
from tests.failing_sessions import SETTINGS, WARMUP
from tests.runs import final_weights, fovea_here, untimed
from tests.saved import saved_tensors
from tests.warm import run_ranks

CASES = {
    "grpo, trained tower": ("recipes/shapes.yaml", "model.freeze_vision_tower=false"),
    "two turns": ("recipes/shapes_zoom.yaml",),
}


PATIENCE_SECONDS = 60.0


def joined(rank: int, port: int, folder: Path) -> None:
    """The settings of GPU memory in a process once it has joined; the first alone has set them."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.pop("PYTORCH_ALLOC_CONF", None)
    if rank == 0:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    join(PATIENCE_SECONDS if rank == 0 else None)
    (folder / str(rank)).write_text(os.environ["PYTORCH_ALLOC_CONF"], encoding="utf-8")
    dist.destroy_process_group()


def test_all_processes_allocate_gpu_memory_as_the_first(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(joined, (store.port, tmp_path), nprocs=2)
    assert [(tmp_path / str(rank)).read_text(encoding="utf-8") for rank in range(2)] == ["expandable_segments:True"] * 2


def test_two_processes_of_torchrun_train_by_ppo_as_one(tmp_path: Path) -> None:
    ppo = ("rollout.samples_per_prompt=2", "algorithm.minibatches=2")
    fovea_here("train", *settings("recipes/shapes_ppo.yaml", tmp_path / "one", *ppo))
    train_by_torchrun(*settings("recipes/shapes_ppo.yaml", tmp_path / "two", *ppo))
    compare(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_failed_sessions_leave_a_rank_without_rows_and_both_train(tmp_path: Path) -> None:
    """One demonstration is left in each step of the warm-up, and fewer episodes than ranks in one of RL."""
    recipe = tmp_path / "doors.yaml"
    recipe.write_text(json.dumps({**SETTINGS, "warmup": {**WARMUP, "batch_size": 8}, "max_steps": 3}))
    doors = "environment=tests/failing_sessions.py:FailingDoors"
    given = (doors, "rollout.prompts_per_step=1", "algorithm.advantage=gae")
    fovea_here("train", str(recipe), f"run_dir={tmp_path / 'one'}", *given)
    train_on_two(str(recipe), f"run_dir={tmp_path / 'two'}", *given)
    one, two = ([row["episodes/failed"] for row in read_metrics(tmp_path / name)] for name in ("one", "two"))
    assert one == two
    assert len(one) == 3
    assert max(one) == 3, "no step has only one episode"
    compare_weights(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(case: str, tmp_path: Path) -> None:
    recipe, *more = CASES[case]
    fovea_here("train", *settings(recipe, tmp_path / "one", *more))
    train_on_two(*settings(recipe, tmp_path / "two", *more))
    compare(tmp_path / "one", tmp_path / "two")


PLACEMENTS = {
    "disaggregated": (2, "cluster.placement=disaggregated"),
    "hybrid": (3, "cluster.placement=hybrid", "model.lora={rank: 4}", "algorithm.kl={coef: 0.05}", "warmup=null"),
}
"""Number of processes, the last of which holds an engine alone, and settings."""


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_processes_with_an_engine_alone_train_as_one(placement: str, tmp_path: Path) -> None:
    processes, setting, *more = PLACEMENTS[placement]
    fovea_here("train", *settings("recipes/shapes.yaml", tmp_path / "one", *more))
    train_on(processes, *settings("recipes/shapes.yaml", tmp_path / "two", setting, "cluster.rollout_gpus=1", *more))
    compare(tmp_path / "one", tmp_path / "two")
    # of the frozen tower, and with LoRA of all but the adapters, nothing is sent again
    trained = saved_tensors(tmp_path / f"two/checkpoints/step-{STEPS}/trainable").values()
    sent = {row["transfer/weights_mib"] for row in read_metrics(tmp_path / "two")}
    assert sent == {sum(tensor.nbytes for tensor in trained) / 2**20}


LATE_REPLIES = """\
import asyncio, random

from fovea_gym.types import Message, Score, Task

class Session:
    def __init__(self, seed):
        self.random = random.Random(seed)

    async def reply(self, turns):
        await asyncio.sleep(random.SystemRandom().uniform(0, 0.05))
        return [Message(role="user", parts=(str(self.random.randint(1, 9)),))] if self.random.random() < 0.8 else None

    def score(self, turns):
        return Score(reward=self.random.random() + len(turns[-1].text) / 32, accuracy=0.0)

class LateReplies:
    max_turns = 4

    def tasks(self, split):
        return [Task(id=f"{split}/{number}", question="Guess.", answer="5") for number in range(16)]

    def prompt(self, task):
        return [Message(role="user", parts=(f"{task.question} {task.id}",))]

    def open(self, task, seed):
        return Session(seed)

    def target(self, task):
        return task.answer
"""
DISAGGREGATED = ("cluster.placement=disaggregated", "cluster.rollout_gpus=1")
REPEATED = {
    "collocated": ("environment.session.max_concurrent=5",),
    "disaggregated": DISAGGREGATED,
    "overlapped": (*DISAGGREGATED, "rollout.max_staleness_steps=1"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.long] if name == "disaggregated" else []) for name in REPEATED]
)
def test_agents_on_two_processes_repeat_and_resume_bit_for_bit_whichever_reply_is_first(
    case: str, tmp_path: Path
) -> None:
    (tmp_path / "late.py").write_text(LATE_REPLIES)
    (tmp_path / "late.yaml").write_text(
        "model: {tiny: {}}\nrollout: {prompts_per_step: 4, samples_per_prompt: 4, max_new_tokens: 4}\n"
        "evaluate: {image_controls: false, dev_size: 2, test_size: 2}\nparity: {prompts: 0}\n"
        f"environment: {{name: own, file: '{tmp_path / 'late.py'}:LateReplies'}}\n"
        "checkpoint: {every_steps: 2}\nlog: {tensorboard: false}\n"
    )
    for name, max_steps in (("first", 3), ("second", 2), ("second", 3)):
        given = (f"run_dir={tmp_path / name}", f"max_steps={max_steps}", *REPEATED[case], "resume=auto")
        train_on_two(str(tmp_path / "late.yaml"), *given)
    rows = {name: without_transfer(tmp_path / name) for name in ("first", "second")}
    assert max(row["turns/mean"] for row in rows["first"]) > 2
    assert rows["second"] == rows["first"]
    assert final_weights(tmp_path / "second", 3) == final_weights(tmp_path / "first", 3)


@pytest.mark.slow
@pytest.mark.kill
def test_a_killed_worker_ends_the_run_which_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start_on_two(killed)
    (worker,) = (each for each in processes_of(killed) if rank_of(each) == "1")
    os.kill(worker, signal.SIGKILL)
    assert_all_end(process, killed)
    steps_before = len(read_metrics(killed))
    assert steps_before < LONG_STEPS
    for run_dir in (killed, whole):
        train_on_two(*settings("recipes/shapes.yaml", run_dir, *LONG), "resume=auto")
    # but for what a resume sends for its parity gate
    sent = "transfer/images_mib"
    assert [row | {sent: 0} for row in untimed(killed)] == [row | {sent: 0} for row in untimed(whole)]


@pytest.mark.slow
@pytest.mark.kill
def test_sigterm_saves_on_two_processes_and_one_goes_on(tmp_path: Path) -> None:
    process = start_on_two(tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    assert_all_end(process, tmp_path / "run")
    steps_before = len(read_metrics(tmp_path / "run"))
    assert steps_before < LONG_STEPS
    done = fovea_here("train", *settings("recipes/shapes.yaml", tmp_path / "run", *LONG), "resume=auto")
    assert f"resumed at step {steps_before}" in done.stdout
    assert len(read_metrics(tmp_path / "run")) == LONG_STEPS


@pytest.mark.slow
@pytest.mark.kill
def test_ranks_whose_launcher_is_killed_end_their_step_and_save(tmp_path: Path) -> None:
    process = start_on_two(tmp_path)
    process.kill()
    assert_all_end(process, tmp_path, seconds=60)
    taken = len(read_metrics(tmp_path))
    assert 3 <= taken < LONG_STEPS
    assert newest_step(tmp_path) == taken


@pytest.mark.kill
@pytest.mark.parametrize("moment", ["", "config.yaml"], ids=["as they start", "while the run is built"])
def test_ranks_whose_launcher_is_killed_while_they_start_end(moment: str, tmp_path: Path) -> None:
    with starting_on_two(tmp_path) as process:
        while len(processes_of(tmp_path)) < 3 or not (tmp_path / moment).exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
        assert_all_end(process, tmp_path, seconds=30)
