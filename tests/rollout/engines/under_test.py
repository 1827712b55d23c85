"""The engine that the tests of this folder run for, and the differences between engines that these tests need.

`make test-vllm` and `make test-sglang` name it by FOVEA_TEST_ENGINE; elsewhere it is the one that can be imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from fovea.config.model import Lora, Model
from fovea.models.tiny import TinyParts, save_tiny
from fovea.models.weights_to_sync import in_layout_of_files, merged_weights_to_sync
from fovea.weights.sync import WeightSender
from fovea_gym.utils.event_loop import wait_for
from tests.rollout.engine_suite import LIMIT_TOKENS, Served
from tests.rollout.two_turns import TURNS
from tests.tiny_models import tiny

ENGINES = ("vllm", "sglang")
NAME = os.environ.get("FOVEA_TEST_ENGINE") or next((name for name in ENGINES if find_spec(name)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUnderTest:
    name: str
    """Value of `rollout.engine`, and marker of the tests."""
    title: str
    """Name of the package in messages."""
    make: Callable[..., Any]
    """`make_engine` of `fovea.rollout.<name>.arguments`."""
    section: Callable[..., Any]
    """Settings of `rollout.engine`."""
    arguments: Callable[[dict[str, Any]], dict[str, Any]]
    """The engine's own arguments, made of these `rollout.engine.engine_args`."""
    refused: Mapping[str, str]
    """Further arguments, each with the message by which it is refused."""
    small: Mapping[str, object] = field(default_factory=dict)
    """Settings that keep the engine small."""
    models: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Settings of tiny models by family, where the engine needs others than the defaults."""
    sharded_environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables by which two workers start on one CPU."""
    lost: str
    """Message of an engine whose process was killed."""
    workers: Callable[[Any], list[psutil.Process]]
    """Processes of an engine that hold shards of the model, by rank."""
    damage: Callable[[pytest.MonkeyPatch, str], None]
    """Change one value of each weight whose name ends so, between trainer and model."""
    launchers: tuple[Any, ...]
    """Launchers of a run whose engine is in a process that does not train, as parameters of a test."""
    processes_of_run: tuple[str, ...]
    """Processes of a run that are killed one after the other; `trainer`, or part of a process title."""

    @property
    def run_settings(self) -> list[str]:
        """Settings of a run that draws with the engine."""
        return [f"rollout.engine={self.name}", *(f"rollout.engine.{key}={x}" for key, x in self.small.items())]


@cache
def under_test() -> EngineUnderTest:
    """The engine of this environment; its module imports the package."""
    engine: EngineUnderTest = import_module(f"tests.rollout.engines.on_{NAME}").ENGINE
    return engine


def tiny_for(family: str, **settings: object) -> TinyParts:
    """A tiny model that the engine has."""
    return tiny(family, **under_test().models.get(family, {}), **settings)


def start(parts: TinyParts, folder: Path, lora: Lora | None = None, dtype: Any = "float32", **settings: object) -> Any:
    """The engine on the files of a model, without a weight sync; `lora` are the adapters that it will be sent."""
    engine = under_test()
    save_tiny(parts, folder)
    return engine.make(
        engine.section(**{"limit_mm_per_prompt": {"image": TURNS}} | engine.small | settings),
        Model(path=str(folder), dtype=dtype, lora=lora),
        parts.processor,
        max_model_len=LIMIT_TOKENS,
        seed=0,
    )


@contextmanager
def serving(parts: TinyParts, folder: Path, **settings: object) -> Iterator[Served]:
    """A model with its engine, which has no weights yet."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in under_test().sharded_environment.items() if "tensor_parallel_size" in settings else ():
            patch.setenv(name, value)
        engine = start(parts, folder, **settings)
    try:
        yield served_by(engine, parts)
    finally:
        wait_for(engine.close())


def served_by(engine: Any, parts: TinyParts) -> Served:
    return Served(parts=parts, engine=engine, sync=partial(sync, engine, parts))


def sync(engine: Any, parts: TinyParts, version: int) -> None:
    """Sync the weights of the network."""
    wait_for(stream(engine, parts).sync(version))


def stream(engine: Any, parts: TinyParts) -> WeightSender:
    """Syncs of the weights of a network, adapters merged; all of them first, then those that are trained."""
    return WeightSender(lambda: in_layout_of_files(merged_weights_to_sync(parts.network)), [engine])
