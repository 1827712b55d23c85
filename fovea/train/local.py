"""The policy in this process, or this process's share of one, for a driver that awaits its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fovea.train.base import CALLS, ModelFacts
from fovea.train.schedule import ImagesByRank
from fovea_gym.utils.event_loop import BackgroundLoop, in_background

if TYPE_CHECKING:  # imports peft, which a driver without a policy of its own does without
    from fovea.train.update import TrainedPolicy


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
    """The policy in this process, or this process's share of one, as the driver awaits it (`Policy`).

    Calls are forwarded by name; only `finish_save` never blocks the event loop.
    """

    def __init__(self, trained: TrainedPolicy, call: Caller = call_here) -> None:
        self.trained = trained
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name not in CALLS:
            raise AttributeError(f"a policy has no call {name}")
        return partial(self._call, getattr(self.trained, name))

    async def finish_save(self) -> None:
        # on a thread, unlike the others: it waits for files while this one computes
        await asyncio.wrap_future(in_background(self.trained.finish_save, "checkpoint is awaited"))

    def images_by_rank(self) -> ImagesByRank:
        """The images that each process needs for the next call; all processes return the same."""
        return self.trained.images_by_rank()

    def describe(self) -> ModelFacts:
        return self.trained.describe()

    async def close(self) -> None:
        self.trained.close()
