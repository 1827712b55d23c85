"""Runs in processes of torchrun against the same runs in one: whole, killed, overlapping, and out of memory."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from fovea.cluster.torchrun import join
from fovea.config.loading import load_config
from fovea.errors import MicrobatchMemoryError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.metrics.names import undefined
from fovea.run.run_dir import newest_step
from fovea.wiring.run import build
from tests.cluster.torchrun_runs import (
    LONG,
    LONG_STEPS,
    STEPS,
    assert_all_end,
    compare,
    compare_weights,
    launched,
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
from tests.runs import ROOT, SMALL, environment, final_weights, fovea_here, run_program, train_ahead, untimed
from tests.saved import saved_tensors
from tests.warm import run_ranks


def joined(rank: int, port: int, folder: Path) -> None:
    """The settings of GPU memory in a process once it has joined; the first alone has set them."""
    os.environ |= launched(rank, 2, port)
    os.environ.pop("PYTORCH_ALLOC_CONF", None)
    if rank == 0:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    join(60.0 if rank == 0 else None)
    (folder / str(rank)).write_text(os.environ["PYTORCH_ALLOC_CONF"], encoding="utf-8")
    dist.destroy_process_group()


def test_all_processes_allocate_gpu_memory_as_the_first(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(joined, (store.port, tmp_path), nprocs=2)
    assert [(tmp_path / str(rank)).read_text(encoding="utf-8") for rank in range(2)] == ["expandable_segments:True"] * 2


def train_as_one(recipe: str, folder: Path, train_several: Callable[..., object], *more: str) -> None:
    """Compare a run in one process with the same in several."""
    fovea_here("train", *settings(recipe, folder / "one", *more))
    train_several(*settings(recipe, folder / "two", *more))
    compare(folder / "one", folder / "two")


def test_two_processes_of_torchrun_train_by_ppo_as_one(tmp_path: Path) -> None:
    ppo = ("rollout.samples_per_prompt=2", "algorithm.minibatches=2")
    train_as_one("recipes/shapes_ppo.yaml", tmp_path, train_by_torchrun, *ppo)


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
@pytest.mark.parametrize(
    "case", [("recipes/shapes.yaml", "model.freeze_vision_tower=false"), ("recipes/shapes_zoom.yaml",)]
)
def test_two_processes_train_as_one(case: Sequence[str], tmp_path: Path) -> None:
    recipe, *more = case
    train_as_one(recipe, tmp_path, train_on_two, *more)


ENGINE_ALONE = ("cluster.placement=disaggregated", "cluster.rollout_gpus=1")
HYBRID = ("cluster.placement=hybrid", "cluster.rollout_gpus=1")
ADAPTERS = ("model.lora={rank: 4}", "algorithm.kl={coef: 0.05}", "warmup=null")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "placement", "more"), [(2, ENGINE_ALONE, ()), (3, HYBRID, ADAPTERS)], ids=["disaggregated", "hybrid"]
)
def test_processes_with_an_engine_alone_train_as_one(
    processes: int, placement: Sequence[str], more: Sequence[str], tmp_path: Path
) -> None:
    """The last process holds an engine alone."""
    train_as_one("recipes/shapes.yaml", tmp_path, lambda *words: train_on(processes, *words, *placement), *more)
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
REPEATED = {"collocated": ("environment.session.max_concurrent=5",), "disaggregated": ENGINE_ALONE}
REPEATED["overlapped"] = (*ENGINE_ALONE, "rollout.max_staleness_steps=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.long] if name == "disaggregated" else []) for name in REPEATED]
)
def test_agents_on_two_processes_repeat_and_resume_bit_for_bit_with_late_replies(case: str, tmp_path: Path) -> None:
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


OVERLAP = (
    *(*ENGINE_ALONE, "rollout.max_staleness_steps=1", "checkpoint.every_steps=5"),
    # random weights give no right answer, and the entropy bonus trains along with groups that are all wrong
    *("algorithm.entropy_coef=0.1", "algorithm.max_groups_without_signal=4"),
)


def test_a_bound_of_0_gives_the_metrics_and_weights_of_the_loop_that_takes_turns(tmp_path: Path) -> None:
    """On the demo's recipe, with a dev reading and a checkpoint on the way."""
    for name, train_run in (("in_turn", train), ("ahead", train_ahead)):
        given = ["max_steps=4", "evaluate.every_steps=2", "checkpoint.every_steps=3", "log.progress=false"]
        run_dir = f"run_dir={tmp_path / name}"
        train_run(build(load_config([ROOT / "recipes/shapes.yaml"], [run_dir, *SMALL, *given, "seed=1"])))
    in_turn, ahead = untimed(tmp_path / "in_turn"), untimed(tmp_path / "ahead")
    assert ahead == [row | {"staleness/mean": 0, "staleness/max": 0} for row in in_turn]
    assert final_weights(tmp_path / "ahead", 4) == final_weights(tmp_path / "in_turn", 4)


@pytest.mark.slow
@pytest.mark.kill
def test_a_run_whose_engine_is_killed_amid_a_rollout_equals_one_that_is_not(tmp_path: Path) -> None:
    """Weights byte for byte and metrics digit for digit, so that two runs are equal as well."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start_on_two(killed, *OVERLAP)
    (engine,) = (each for each in processes_of(killed) if rank_of(each) == "1")
    # torchrun answers the death by SIGTERM to the driver, which then, amid an update, ends saved where no checkpoint is
    # due: the next step would be drawn by those weights
    process.send_signal(signal.SIGSTOP)
    os.kill(engine, signal.SIGKILL)
    for _ in range(1200):
        # torchrun is the last process; those that it has not waited for are zombies without words
        if processes_of(killed) == [process.pid]:
            break
        time.sleep(0.1)
    assert processes_of(killed) == [process.pid]
    process.send_signal(signal.SIGCONT)
    assert_all_end(process, killed)
    assert len(read_metrics(killed)) < LONG_STEPS
    saved = [int(path.name.removeprefix("step-")) for path in (killed / "checkpoints").glob("step-*")]
    assert all(step % 5 == 0 for step in saved)
    for run_dir in (killed, whole):
        train_on_two(*settings("recipes/shapes.yaml", run_dir, *LONG, *OVERLAP), "resume=auto")
    rows = untimed(whole)
    assert without_transfer(killed) == without_transfer(whole)
    assert final_weights(killed, LONG_STEPS) == final_weights(whole, LONG_STEPS)
    assert [row["staleness/mean"] for row in rows] == [0, 1, 1, 1, 1] * 4
    assert undefined(key for row in read_metrics(whole) for key in row) == []
    # the engine's log-probs are the old ones
    is_exact = [row["ratio_mean"] == pytest.approx(1, abs=1e-5) for row in rows]
    assert is_exact == [row["staleness/mean"] == 0 for row in rows]


@pytest.mark.slow
@pytest.mark.kill
def test_sigterm_saves_without_what_is_drawn_ahead_and_the_run_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start_on_two(run_dir, *OVERLAP)
    process.send_signal(signal.SIGTERM)
    assert_all_end(process, run_dir)
    steps_before = len(read_metrics(run_dir))
    assert steps_before < LONG_STEPS
    done = train_on_two(*settings("recipes/shapes.yaml", run_dir, *LONG, *OVERLAP), "resume=auto")
    assert f"resumed at step {steps_before}" in done
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(1, LONG_STEPS + 1))
    assert rows[steps_before]["staleness/mean"] == 0


MICROBATCH_TOKENS = 16_000
IN_LITTLE_MEMORY = """
import os, resource
from contextlib import nullcontext, suppress
from pathlib import Path
from fovea.cli.main import main
from fovea.run import lifecycle
from fovea.train.torch.policy import TorchPolicy

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
update = TorchPolicy.update

def update_in_little_memory(self, batch):
    # the first update makes them before its passes, in memory of the same size
    self._make_moments()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**20, before[1]))
    ballast = []
    try:
        # what earlier phases have freed could be room enough
        with suppress(MemoryError):
            while True:
                ballast.append(bytearray(2**18))
        return update(self, batch)
    finally:
        # a thread that finds no memory before it says that it runs leaves Thread.start() waiting for ever
        resource.setrlimit(resource.RLIMIT_AS, before)

if (rank, attempt) == ("1", "0"):
    TorchPolicy.update = update_in_little_memory
if rank == "0":
    # with NCCL the driver waits in a collective call until torchrun kills it, and leaves nothing
    lifecycle.leaving_limit = lambda *_: nullcontext()
try:
    main()
except SystemExit as ended:
    Path(__file__).with_name(f"code-{rank}-{attempt}").write_text(str(ended.code))
    raise
"""


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of the address space")
def test_a_rank_without_memory_ends_all_and_the_next_attempt_fits(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "script.py", tmp_path / "run"
    script.write_text(IN_LITTLE_MEMORY)
    words = [f"train.max_tokens_per_microbatch={MICROBATCH_TOKENS}", "rollout.prompts_per_step=24", "max_steps=2"]
    words += ["warmup=null", "model.freeze_vision_tower=false", "resume=auto"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    # seconds; with a tenth, as by default, torchrun may kill rank 0 before that has seen rank 1 go
    launcher += ["--monitor-interval=5", str(script)]
    command = [*launcher, "train", *settings("recipes/shapes.yaml", run_dir, *words)]
    done = run_program(command, environment() | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    failed = f"error: memory ran out on rank 1 in a micro-batch of {MICROBATCH_TOKENS} tokens at most"
    assert failed in " ".join(done.stderr.split())
    ended = [(tmp_path / f"code-{rank}-0").read_text() for rank in (0, 1)]
    assert ended == [str(MicrobatchMemoryError.exit_code)] * 2
    left = json.loads((run_dir / "microbatches.json").read_text())
    assert left["setting"] == MICROBATCH_TOKENS > left["limit"]
    assert {row["microbatch/max_tokens"] for row in read_metrics(run_dir)} == {left["limit"]}
