"""An `Engine` that runs in a process of another Python environment.

The packages that an engine needs may conflict with the trainer's, for example in the version of transformers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from torch import Tensor

from fovea.processes.engine_process import EngineProcess
from fovea.types import Completion, Request, Shape
from fovea.utils.tensor_records import handles


class RemoteEngine:
    """Forwards calls to an engine in another process (`wiring.other_environment`), which checks them."""

    def __init__(self, name: str, process: EngineProcess) -> None:
        self.name = name
        self.process = process
        self._given_up: set[Future[Any]] = set()
        """Pending aborts of requests whose callers were cancelled."""

    async def generate(self, request: Request) -> Sequence[Completion]:
        """Sample n completions of one prompt."""
        drawing = self.process.call("generate", request)
        try:
            completions: Sequence[Completion] = await asyncio.wrap_future(drawing)
        finally:
            if not drawing.done():  # its caller was cancelled
                self._given_up.add(self.process.call("abort", request.id))
        return completions

    async def sleep(self) -> None:
        """Free device memory for the update."""
        self._forget_given_up()
        await self._call("engine.sleep")

    async def wake(self) -> None:
        """Accept requests again."""
        await self._call("engine.wake")

    def check_processes(self) -> None:
        """Raise LostEngineError if the engine's process has ended."""
        self.process.check()

    async def close(self) -> None:
        """Stop the engine and its process."""
        self.process.close()

    @property
    def has_weights(self) -> bool:
        """True if the engine holds all weights."""
        has_weights: bool = self.process.run("has_weights")
        return has_weights

    def begin_sync(self, shapes: Mapping[str, Shape]) -> None:
        """Prepare for weights of these names and shapes."""
        self._forget_given_up()
        self.process.run("engine.begin_sync", dict(shapes))

    def receive_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Load a bucket of weights from memory that both processes share."""
        self.process.run("receive_weights", handles(bucket))

    def finish_sync(self, version: int) -> None:
        """Compare all weights with those sent, and empty all caches made with older ones."""
        self.process.run("engine.finish_sync", version)

    async def _call(self, method: str) -> None:
        await asyncio.wrap_future(self.process.call(method))

    def _forget_given_up(self) -> None:
        """Wait until cancelled requests have ended: until then, the engine counts them as running."""
        while self._given_up:
            wait([self._given_up.pop()])
