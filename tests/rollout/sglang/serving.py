"""A tiny model behind SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fovea.cluster.engine_stream import EngineStream
from fovea.cluster.local import call_here
from fovea.cluster.streamed import StreamedWeights
from fovea.config.backends import SglangEngine as Settings
from fovea.config.run import Model
from fovea.models.outgoing import outgoing_merged
from fovea.models.tiny import TinyParts, save_tiny
from fovea.rollout.sglang.arguments import make_engine
from fovea.rollout.sglang.engine import SglangEngine
from fovea.utils.event_loop import wait_for
from tests.rollout.engine_suite import LIMIT_TOKENS, Served
from tests.tiny_models import tiny


@contextmanager
def serving(family: str, folder: Path) -> Iterator[Served]:
    """A tiny model of a family with its engine, which has its weights as version 7."""
    # SGLang has Qwen2.5-VL with this size of patches alone
    parts = tiny(family, **({"patch_size_px": 14} if family == "qwen2_5_vl" else {}))
    engine = start(parts, folder)
    try:
        push(engine, parts, 7)
        yield Served(parts=parts, engine=engine, push=lambda version: push(engine, parts, version))
    finally:
        wait_for(engine.close())


def start(parts: TinyParts, folder: Path, **settings: object) -> SglangEngine:
    """SGLang on the files of a model, without a push."""
    save_tiny(parts, folder)
    return make_engine(
        Settings(**settings),  # type: ignore[arg-type]
        Model(path=str(folder), dtype="float32"),
        parts.processor,
        max_model_len=LIMIT_TOKENS,
        seed=0,
    )


def push(engine: SglangEngine, parts: TinyParts, version: int) -> None:
    """Push the weights of the network."""
    wait_for(stream(engine, parts).push(version))


def stream(engine: SglangEngine, parts: TinyParts) -> StreamedWeights:
    """Pushes of the weights of a network, adapters merged; all of them first, then those that are trained."""
    return StreamedWeights(lambda: outgoing_merged(parts.network), torch.float32, [EngineStream(engine)], call_here)
