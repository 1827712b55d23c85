"""A tiny model behind the engine under test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fovea.config.model import Lora, Model
from fovea.models.tiny import TinyParts, save_tiny
from fovea.models.weights_to_sync import in_layout_of_files, merged_weights_to_sync
from fovea.weights.sync import WeightSender
from fovea_gym.utils.event_loop import wait_for
from tests.rollout.engine_suite import LIMIT_TOKENS, Served
from tests.rollout.engines.under_test import under_test
from tests.rollout.two_turns import TURNS
from tests.tiny_models import tiny


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
