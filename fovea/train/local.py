"""Asynchronous calls to the policy in this process, or to this process's part of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fovea.train.base import CALLS, ModelFacts
from fovea.train.schedule import ImagesByRank
from fovea_gym.utils.event_loop import BackgroundLoop, in_background

if TYPE_CHECKING:  # imports peft, which a driver whose policy is in other processes does not need
    from fovea.train.update import TrainedPolicy


class Caller(Protocol):
    """Makes blocking calls for a coroutine."""

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any: ...


async def call_here(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function on the thread of the event loop, which is blocked until it returns.

    For a process that has nothing else to do while the policy computes: torch's autograd and thread settings belong to
    the thread that made them.
    """
    return function(*arguments)


class CallerThread:
    """Makes all calls in order on one separate thread, while the event loop continues."""

    def __init__(self, name: str) -> None:
        self._loop = BackgroundLoop(name)
        # torch has a current GPU for each thread
        self._gpu = torch.cuda.current_device() if torch.cuda.is_available() else None

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self._loop.run(self._call(function, arguments))

    async def _call(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        return function(*arguments)


class LocalPolicy:
    """A `Policy` for the driver: the policy in this process, or this process's part of it.

    Calls are forwarded by name. `finish_save` is the only one that never blocks the event loop.
    """

    def __init__(self, trained: TrainedPolicy, call: Caller = call_here) -> None:
        self.trained = trained
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name not in CALLS:
            raise AttributeError(f"a policy has no call {name}")
        return partial(self._call, getattr(self.trained, name))

    async def finish_save(self) -> None:
        # on a background thread, unlike the other calls: it waits for files while this thread computes
        await asyncio.wrap_future(in_background(self.trained.finish_save, "checkpoint is awaited"))

    def images_by_rank(self) -> ImagesByRank:
        """Return the images that each process needs for the next call; the result is the same on all processes."""
        return self.trained.images_by_rank()

    def describe(self) -> ModelFacts:
        return self.trained.describe()

    async def close(self) -> None:
        self.trained.close()
