"""Metrics: their definitions and page, numbers by turn and tool, and rates beside what torch counts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch.utils.flop_counter import FlopCounterMode

from fovea.config.algorithm import Algorithm
from fovea.config.sections import Log
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.metrics.names import METRICS, Metric, definition_of, metrics_page, undefined
from fovea.metrics.progress import Progress
from fovea.metrics.throughput import known_peak_tflops, rates
from fovea.metrics.turns import turn_metrics
from fovea.models.tiny import TinyParts
from fovea.train.base import ModelFacts
from fovea.types import Batch, Completion, Episode, EpisodeEnd, Group, SampledTurn, SampleGroup, TurnTokens
from fovea.wiring.outputs import peak_tflops
from fovea_gym.types import Message, Score, Task, Turn
from gym_tests.tables import table
from tests.flops import NOT_COUNTED_BY_TORCH
from tests.policies import make_policy
from tests.records import completion_of, one_turn, sample_of, text_prompt
from tests.tiny_models import image, renderer, tiny, user
from tests.wiring.small import run_of

ROOT = Path(__file__).parents[2]
STEP = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 3}


def test_the_command_prints_the_page() -> None:
    command = [sys.executable, "-m", "fovea.metrics.names"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == metrics_page()


def test_every_row_of_the_page_has_four_cells() -> None:
    rows = [line for line in metrics_page().splitlines() if line.startswith("| `")]
    assert len(rows) == len(METRICS)
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {6}


def test_each_metric_is_defined_once_and_in_full() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert metric.meaning.endswith("."), metric.name
        assert metric.healthy.endswith("."), metric.name


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("reward/overlong", "reward/overlong"),
        ("reward/format", "reward/<part>"),
        ("accuracy/dev/how many", "accuracy/dev/<kind>"),
        ("seconds/step", "seconds/step"),
        ("memory/activations_gib", "memory/activations_gib"),
        ("memory/rollout_gib", "memory/<phase>_gib"),
        *((key, None) for key in ("rewards", "accuracy/dev/", "xreward", "seconds", "memory/rollout", "loss/total")),
    ],
)
def test_a_name_goes_before_its_family(key: str, name: str | None) -> None:
    assert getattr(definition_of(key), "name", None) == name
    assert undefined(["step", "reward", key]) == ([] if name else [key])


def test_a_dot_in_a_name_is_a_dot() -> None:
    assert Metric(name="a.b", unit="", meaning="", healthy="").pattern.fullmatch("axb") is None


ALL_TERMS = {"kl": {"coef": 0.1}, "importance_sampling_fix": True, "entropy_coef": 0.01}
RUNS = {
    "dev readings": {"evaluate": {"every_steps": 1, "dev_size": 4}, "log": {"progress": False, "peak_tflops": 0.1}},
    "every term of the loss": {"algorithm": {**ALL_TERMS, "ppo_epochs": 2, "minibatches": 2}},
}


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_what_a_run_writes_is_defined(settings: dict[str, object], tmp_path: Path) -> None:
    train(run_of(tmp_path, **{"max_steps": 1, "rollout": STEP, "evaluate": {"image_controls": False}, **settings}))
    (row,) = read_metrics(tmp_path)
    assert len(row) > 30
    assert undefined(row) == []


TASK = Task(id="train/0", question="q", answer="a")


def turn(*logprobs: float, messages: tuple[Message, ...] = (), seconds: float = 0.0) -> Turn:
    ids, values = np.arange(len(logprobs)), np.array(logprobs, dtype=np.float32)
    completion = Completion(token_ids_T=ids, logprobs_T=values, text="x", finish="stop", version=0)
    tokens = TurnTokens(observation=text_prompt([0]), completion=completion)
    return SampledTurn(messages=messages, text="x", tokens=tokens, seconds=seconds)


def episode(*turns: Turn, rewards: tuple[float, ...] = (), end: EpisodeEnd = "done") -> Episode:
    return Episode(task=TASK, turns=turns, score=Score(reward=sum(rewards), accuracy=0, turns=rewards), end=end)


def result(tool: str, failed: bool = False) -> Message:
    return Message(role="tool", parts=("42",), tool=tool, failed=failed)


def test_numbers_by_hand() -> None:
    long = episode(
        turn(-1, -2),
        turn(-0.5, messages=(result("zoom"), result("zoom")), seconds=2),
        turn(-0.5, -0.5, -0.5, messages=(result("mesure", failed=True),), seconds=4),
        rewards=(0, 0.5, 1),
        end="max_turns",
    )
    short = episode(turn(-3, -4, -5, -6), rewards=(0.25,))
    metrics = turn_metrics([long, short])
    assert metrics == pytest.approx(
        {
            "turns/mean": 2,
            "turns/max": 3,
            "turns/limit_frac": 0.5,
            "turns/token_limit_frac": 0,
            "seconds/reply_max": 4,
            "turns/1/tokens": 3,
            "turns/1/entropy": 21 / 6,
            "turns/1/reward": 0.125,
            "turns/2/tokens": 1,
            "turns/2/entropy": 0.5,
            "turns/2/reward": 0.5,
            "turns/3/tokens": 3,
            "turns/3/entropy": 0.5,
            "turns/3/reward": 1,
            "tools/calls/zoom": 1,
            "tools/failed_frac": 1 / 3,
        }
    )
    assert undefined(metrics) == []


def test_an_answer_that_an_environment_could_not_read_is_no_failed_call() -> None:
    """Nine of ten moves of a game are played: the share of failed calls was 1, since only failures were counted."""
    played, unread = (Message(role="user", parts=("x",), failed=failed) for failed in (False, True))
    replies = [turn(-1, messages=(played,)) for _ in range(9)]
    metrics = turn_metrics([episode(turn(-1), *replies, turn(-1, messages=(unread,)))])
    assert metrics["turns/unread_frac"] == pytest.approx(0.1)
    assert not [name for name in metrics if name.startswith("tools/")]
    assert undefined(metrics) == []


def test_long_episodes_and_many_tools_have_few_names() -> None:
    calls = [(result(f"tool{number}"), result("often")) for number in range(59)]
    odd = (result("<b>\n"), result("x" * 65), result("says the model", failed=True))
    metrics = turn_metrics([episode(turn(-1), *(turn(-1, messages=(*call, *odd)) for call in calls))])
    numbered = {name.split("/")[1] for name in metrics if name.endswith("/tokens")}
    assert numbered == {*map(str, range(1, 10)), "10+"}
    tools = {name: count for name, count in metrics.items() if name.startswith("tools/calls/")}
    assert len(tools) == 21
    assert (tools["tools/calls/often"], tools["tools/calls/other"]) == (59, 2 * 59 + 40)
    assert undefined(metrics) == []


ONE_TERATION = 1e12
FEW_PER_CENT = 0.05


def group_of(*lengths: int) -> Group:
    task, score = Task(id="t", question="q", answer="a"), Score(reward=0, accuracy=0)
    episodes = tuple(one_turn(task, completion_of(range(n)), score) for n in lengths)
    return Group(prompt=text_prompt([0]), episodes=episodes)


def test_rates_by_hand_of_what_is_known() -> None:
    seconds = {"seconds/step": 4.0, "seconds/update": 2.0}
    groups = [group_of(5, 7), group_of(4)]
    expected = {"samples_per_second": 3 / 4, "tokens_per_second": 16 / 4}
    assert rates(groups, seconds, peak_tflops=200) == expected
    expected["tflops_per_second"] = 50
    assert rates(groups, seconds | {"update_tflop": 100.0}, peak_tflops=None) == expected
    assert rates(groups, seconds | {"update_tflop": 100.0}, peak_tflops=200) == expected | {"mfu": 0.25}


PEAKS = {
    312: ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
    989.5: ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"),
    756.5: ("NVIDIA H100 PCIe",),
    835.5: ("NVIDIA H100 NVL",),
    2250: ("NVIDIA B200",),
    2500: ("NVIDIA GB200",),
    121: ("NVIDIA L4",),
    362.05: ("NVIDIA L40S",),
    165.2: ("NVIDIA GeForce RTX 4090",),
    None: (
        *("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
        *("NVIDIA A10G", "Tesla T4", ""),
    ),
}


@table(("name", "tflops"), [(name, tflops) for tflops, names in PEAKS.items() for name in names])
def test_a_device_is_known_by_the_words_of_its_name(name: str, tflops: float | None) -> None:
    assert known_peak_tflops(name) == tflops


def facts(device: str, device_name: str | None, num_workers: int = 1) -> ModelFacts:
    return ModelFacts(device=device, device_name=device_name, parameters=(), num_workers=num_workers)


def test_the_peak_is_the_setting_or_the_data_sheet() -> None:
    said = list[str]()
    progress = Progress(1, 0, enabled=False)
    progress.print = lambda line: said.append(str(line))  # type: ignore[method-assign]
    assert peak_tflops(Log(), facts("cpu", None), progress) is None
    assert peak_tflops(Log(peak_tflops=3), facts("cpu", None), progress) == 3
    assert peak_tflops(Log(peak_tflops=3), facts("cuda", "NVIDIA H200"), progress) == 3
    assert peak_tflops(Log(peak_tflops=3), facts("cuda", "NVIDIA H200", num_workers=8), progress) == 24
    assert not said
    for name, peak, line in (
        ("NVIDIA H200", 8 * 989.5, "mfu: a share of 989.5 TFLOP/s, dense bfloat16 by the data sheet of NVIDIA H200"),
        ("New", None, "mfu: not reported, the peak of New is not known; set log.peak_tflops (dense bfloat16)"),
    ):
        assert peak_tflops(Log(), facts("cuda", name, num_workers=8), progress) == peak
        assert said[-1] == line


def batch_of(parts: TinyParts, lengths: tuple[int, ...]) -> Batch:
    """One group: an image of 48 x 48 px, and completions of these lengths."""
    prompt = renderer(parts).prompt(user(image(1), "How many circles?"))
    rng, samples = np.random.default_rng(0), []
    for n in lengths:
        fields = {"rollout_logprobs_T": np.full(n, -5, np.float32), "advantages_T": np.ones(n, np.float32)}
        samples.append(sample_of(rng.integers(0, 250, n), reward=1.0, weight=1 / sum(lengths), **fields))
    return Batch(groups=(SampleGroup(prompt=prompt, samples=tuple(samples)),))


@pytest.mark.parametrize(("family", "epochs"), [("qwen2_5_vl", 1), ("qwen3_vl", 1), ("qwen3_vl", 2)])
def test_the_arithmetic_of_an_update_is_what_torch_counts(family: str, epochs: int) -> None:
    """Of a model whose matrices outweigh its attention: torch counts masked pairs, and the last layer drops tokens."""
    text = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 512}
    parts = tiny(family, **text, num_layers=8, vision_hidden_size=128, vision_depth=6, vision_heads=4)
    policy = make_policy(parts, algorithm=Algorithm(ppo_epochs=epochs))
    batch = batch_of(parts, (30, 24, 36))
    with FlopCounterMode(display=False, custom_mapping=NOT_COUNTED_BY_TORCH) as counter:
        counted = policy.update(batch)["update_tflop"] * ONE_TERATION
    by_torch = counter.get_total_flops()
    assert counted == pytest.approx(by_torch, rel=FEW_PER_CENT)
    vision = 3 * epochs * policy.vlm.family.work.image(batch.groups[0].prompt.images[0])
    assert vision > 2 * FEW_PER_CENT * by_torch, "leaving the images out would show"
