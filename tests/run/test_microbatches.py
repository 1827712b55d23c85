"""Micro-batches that had to become smaller stay so in the processes that go on with the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.errors import MicrobatchMemoryError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.run.lifecycle import begin
from fovea.types import Batch, Metrics
from fovea_gym.utils.event_loop import wait_for
from tests.fakes import BanditPolicy, run_with

SETTING = 1000
TRAIN = {"max_tokens_per_microbatch": SETTING}


class SmallMemoryPolicy(BanditPolicy):
    """Its twelfth update has room for half a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.max_tokens = SETTING

    async def limit_microbatches(self, max_tokens: int) -> None:
        self.max_tokens = self.limited_to = max_tokens

    async def update(self, batch: Batch) -> Metrics:
        metrics = await super().update(batch)
        if self.updates == 12 and self.max_tokens == SETTING:
            await self.run_out()
        return metrics | {"microbatch/max_tokens": float(self.max_tokens)}

    async def run_out(self) -> None:
        self.max_tokens = SETTING // 2


class OneOfSeveral(SmallMemoryPolicy):
    async def run_out(self) -> None:
        raise MicrobatchMemoryError("memory ran out on rank 1", SETTING // 2)


def sizes(folder: Path) -> list[float]:
    return [row["microbatch/max_tokens"] for row in read_metrics(folder)]


def test_a_resumed_run_has_the_micro_batches_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    train(run_with(SmallMemoryPolicy(), tmp_path / "whole", train=TRAIN))
    train(run_with(SmallMemoryPolicy(), tmp_path / "stopped", train=TRAIN, max_steps=15))
    train(run_with(SmallMemoryPolicy(), tmp_path / "stopped", resume=True, train=TRAIN))
    assert sizes(tmp_path / "stopped") == sizes(tmp_path / "whole") == [SETTING] * 11 + [SETTING / 2] * 19


class BesideEngine(SmallMemoryPolicy):
    """One of several ranks, whose memory ran out beside the engine's: the same limit will do."""

    async def run_out(self) -> None:
        raise MicrobatchMemoryError("memory ran out on rank 1 beside the engine's", SETTING)


@pytest.mark.parametrize(("policy", "left"), [(OneOfSeveral, SETTING / 2), (BesideEngine, SETTING)])
def test_a_rank_that_ran_out_of_memory_leaves_a_size_for_the_next_attempt(
    policy: type[SmallMemoryPolicy], left: float, tmp_path: Path
) -> None:
    with pytest.raises(MicrobatchMemoryError):
        train(run_with(policy(), tmp_path, train=TRAIN))
    next_attempt = run_with(policy(), tmp_path, resume=True, train=TRAIN, max_steps=11)
    train(next_attempt)
    assert vars(next_attempt.policy)["limited_to"] == left
    assert sizes(tmp_path) == [SETTING] * 10 + [left]


LIMITED = f"micro-batches have {SETTING // 2} tokens at most, since memory ran out before this resume; set train.max"
FREED = "the KV cache is freed before every update, since memory ran out before this resume"


@pytest.mark.parametrize(
    ("policy", "engine", "printed"),
    [
        (OneOfSeveral, "embedded", [LIMITED, FREED]),
        (OneOfSeveral, "vllm", [LIMITED]),
        (BesideEngine, "embedded", [FREED]),
        (BesideEngine, "vllm", []),
    ],
)
def test_a_resume_prints_what_changes_after_memory_ran_out(
    policy: type[SmallMemoryPolicy], engine: str, printed: list[str], tmp_path: Path
) -> None:
    with pytest.raises(MicrobatchMemoryError):
        train(run_with(policy(), tmp_path, train=TRAIN))
    resumed = run_with(policy(), tmp_path, resume=True, train=TRAIN, rollout={"engine": {"name": engine}})
    lines: list[str] = []
    resumed.progress.print = lambda line: lines.append(str(line))  # type: ignore[method-assign]
    wait_for(begin(resumed))
    found = [line for line in lines if line.endswith("before this resume") or "tokens at most" in line]
    assert [line.startswith(start) for line, start in zip(found, printed, strict=True)] == [True] * len(printed)


def test_another_setting_is_a_new_beginning(tmp_path: Path) -> None:
    with pytest.raises(MicrobatchMemoryError):
        train(run_with(OneOfSeveral(), tmp_path, train=TRAIN))
    policy = OneOfSeveral()
    policy.max_tokens = 2 * SETTING
    train(run_with(policy, tmp_path, resume=True, train={"max_tokens_per_microbatch": 2 * SETTING}))
    assert sizes(tmp_path)[10:] == [2 * SETTING] * 20
