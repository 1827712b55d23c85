"""A tiny model behind vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fovea.cluster.engine_stream import EngineStream
from fovea.cluster.local import call_here
from fovea.cluster.streamed import StreamedWeights
from fovea.config.backends import VllmEngine as Settings
from fovea.config.run import Lora, Model
from fovea.models.outgoing import outgoing_merged
from fovea.models.tiny import TinyParts, save_tiny
from fovea.rollout.vllm.arguments import make_engine
from fovea.rollout.vllm.engine import VllmEngine
from fovea.utils.event_loop import wait_for
from tests.rollout.engine_suite import LIMIT_TOKENS, Served
from tests.tiny_models import tiny

KV_CACHE_GIB = 0.25


@contextmanager
def serving(family: str, folder: Path) -> Iterator[Served]:
    """A tiny model of a family with its engine, which has its weights as version 7."""
    parts = tiny(family)
    engine = start(parts, folder)
    push(engine, parts, 7)
    try:
        yield Served(parts=parts, engine=engine, push=lambda version: push(engine, parts, version))
    finally:
        wait_for(engine.close())


def start(parts: TinyParts, folder: Path, lora: Lora | None = None, **settings: object) -> VllmEngine:
    """vLLM on the files of a model, without a push; `lora` are the adapters that it will be sent."""
    save_tiny(parts, folder)
    return make_engine(
        Settings(kv_cache_gib=KV_CACHE_GIB, enforce_eager=True, **settings),  # type: ignore[arg-type]
        Model(path=str(folder), dtype="float32", lora=lora),
        parts.processor,
        max_model_len=LIMIT_TOKENS,
        seed=0,
    )


def push(engine: VllmEngine, parts: TinyParts, version: int) -> None:
    """Push the weights of the network."""
    wait_for(stream(engine, parts).push(version))


def stream(engine: VllmEngine, parts: TinyParts) -> StreamedWeights:
    """Pushes of the weights of a network, adapters merged; all of them first, then those that are trained."""
    return StreamedWeights(lambda: outgoing_merged(parts.network), torch.float32, [EngineStream(engine)], call_here)
