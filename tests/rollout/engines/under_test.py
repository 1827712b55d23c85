"""The engine that the tests of this folder run for, and the differences between engines that these tests need.

`make test-vllm` and `make test-sglang` name it by FOVEA_TEST_ENGINE; elsewhere it is the one that can be imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import psutil
import pytest

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
