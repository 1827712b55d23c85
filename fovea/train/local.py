"""The policy in this process, or this process's share of one, behind the protocol that the driver awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from fovea.train.base import ModelFacts, Needs, PolicyWorker, SftExample
from fovea.train.schedule import ImagesByRank
from fovea.types import Batch, Metrics
from fovea_gym.utils.event_loop import BackgroundLoop, in_background


class Caller(Protocol):
    """Makes blocking calls for a coroutine."""

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any: ...


async def call_here(function: Callable[..., Any], *arguments: Any) -> Any:
    """Make the call on the event loop's own thread, and block it meanwhile.

    For a process in which nothing else has work while the policy computes: torch's autograd and thread settings belong
    to the thread that made them.
    """
    return function(*arguments)


class CallerThread:
    """One thread for all calls, in their order, so that the event loop goes on meanwhile."""

    def __init__(self, name: str) -> None:
        self._loop = BackgroundLoop(name)
        # torch's current GPU is that of a thread
        self._gpu = torch.cuda.current_device() if torch.cuda.is_available() else None

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self._loop.run(self._call(function, arguments))

    async def _call(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        return function(*arguments)


class LocalPolicy:
    """A policy of one process, or this process's share of one; only `finish_save` never blocks the event loop."""

    def __init__(self, worker: PolicyWorker, call: Caller = call_here) -> None:
        self.worker = worker
        self._call = call

    async def annotate(self, batch: Batch, needs: Needs) -> Batch:
        annotated: Batch = await self._call(self.worker.annotate, batch, needs)
        return annotated

    async def update(self, batch: Batch) -> Metrics:
        metrics: Metrics = await self._call(self.worker.update, batch)
        return metrics

    async def sft(self, pairs: Sequence[SftExample]) -> Metrics:
        metrics: Metrics = await self._call(self.worker.sft, pairs)
        return metrics

    async def snapshot_reference(self) -> None:
        await self._call(self.worker.snapshot_reference)

    async def save(self, folder: Path) -> None:
        await self._call(self.worker.save, folder)

    async def finish_save(self) -> None:
        # on a thread, unlike the others: it waits for files while this one computes
        await asyncio.wrap_future(in_background(self.worker.finish_save, "checkpoint is awaited"))

    async def load(self, folder: Path) -> None:
        await self._call(self.worker.load, folder)

    async def limit_microbatches(self, max_tokens: int) -> None:
        await self._call(self.worker.limit_microbatches, max_tokens)

    async def export(self, folder: Path) -> None:
        await self._call(self.worker.export, folder)

    def images_by_rank(self) -> ImagesByRank:
        return self.worker.images_by_rank()

    def describe(self) -> ModelFacts:
        return self.worker.describe()

    async def close(self) -> None:
        self.worker.close()
