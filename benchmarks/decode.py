"""Decoding speed of the embedded engine, against the floor of its matrix products only.

    python -m benchmarks.decode [tokens]

All completions have the same length (no stop token), so that the number of rows is constant. The floor is the time of
the language model's linear layers and head on the same number of rows. Prints a table; asserts nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.cases import CASES, BenchEnvironment, endless, make_parts, make_tasks
from fovea.data.images import ImageOpener
from fovea.models.modules import language_model
from fovea.models.render import Renderer
from fovea.models.tiny import TinyParts
from fovea.models.trainable import merged_weights
from fovea.models.vlm import VLM
from fovea.rollout.embedded.engine import EmbeddedEngine
from fovea.types import Completion, Prompt, Request, Sampling
from fovea.utils.event_loop import wait_for

REPEATS = 3
"""Runs of each case; the fastest counts, since other work on the machine only slows a run down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of one case, a row of the table."""

    case: str
    prompts: int
    samples: int
    question_repeats: int = 1
    """Words per question, which lengthen the prompts."""
    vocabulary: int = 32_768


SETTINGS = (
    Setting(case="image_heavy", prompts=1, samples=8),
    Setting(case="image_heavy", prompts=4, samples=8),
    Setting(case="image_heavy", prompts=8, samples=16),
    Setting(case="image_heavy", prompts=4, samples=8, question_repeats=40),
    Setting(case="image_heavy", prompts=4, samples=8, vocabulary=151_936),
    Setting(case="mid", prompts=1, samples=8),
    Setting(case="mid", prompts=4, samples=8),
    Setting(case="mid", prompts=8, samples=16),
)


def main(tokens: str = "48") -> None:
    print(
        f"{'case':12} {'rows':>5} {'prompt':>7} {'vocab':>8} {'prefill s':>10} {'ms/step':>8} {'floor':>7} {'tok/s':>7}"
    )
    for setting in SETTINGS:
        _measure(setting, int(tokens))


def _measure(setting: Setting, num_tokens: int) -> None:
    case = replace(CASES[setting.case], vocabulary=setting.vocabulary)
    parts = endless(make_parts(case))
    engine = EmbeddedEngine(VLM(parts.network, parts.processor.banned_ids), parts.processor, max_batch_tokens=1 << 20)
    engine.load_weights(dict(merged_weights(parts.network)), version=0)
    tasks = make_tasks(case, setting.prompts)
    tasks = [replace(task, question=" ".join([task.question] * setting.question_repeats)) for task in tasks]
    environment = BenchEnvironment(tasks)
    render = Renderer(parts.processor, ImageOpener(max_mib=32, max_megapixels=64))
    prompts = [render.prompt(environment.prompt(task)) for task in tasks]
    first = _fastest(lambda: _draw(engine, prompts, setting.samples, 1))
    whole = _fastest(lambda: _draw(engine, prompts, setting.samples, num_tokens))
    rows, step = setting.prompts * setting.samples, (whole - first) / (num_tokens - 1)
    print(
        f"{setting.case:12} {rows:5} {max(p.num_tokens for p in prompts):7} {setting.vocabulary:8} {first:10.2f} "
        f"{1000 * step:8.1f} {_floor(parts, rows) / step:7.0%} {rows / step:7.0f}",
        flush=True,
    )


def _draw(engine: EmbeddedEngine, prompts: Sequence[Prompt], n: int, tokens: int) -> None:
    async def all_of_them() -> Sequence[Sequence[Completion]]:
        requests = [
            Request(id=str(index), prompt=prompt, sampling=Sampling(max_new_tokens=tokens, seed=index), n=n)
            for index, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*map(engine.generate, requests))

    wait_for(all_of_them())


def _floor(parts: TinyParts, rows: int) -> float:
    """Seconds of the linear layers in one decode step."""
    layers = [m.weight for m in language_model(parts.network).modules() if isinstance(m, nn.Linear)]
    weights = [*layers, language_model(parts.network).get_submodule("embed_tokens").get_parameter("weight")]
    inputs = [torch.randn(rows, weight.shape[1]) for weight in weights]

    def run() -> None:
        for x, weight in zip(inputs, weights, strict=True):
            F.linear(x, weight)

    with torch.no_grad():
        return _fastest(run, 10 * REPEATS)


def _fastest(run: Callable[[], None], repeats: int = REPEATS) -> float:
    def seconds() -> float:
        started = perf_counter()
        run()
        return perf_counter() - started

    return min(seconds() for _ in range(repeats))


if __name__ == "__main__":
    main(*sys.argv[1:])
