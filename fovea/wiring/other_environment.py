"""The process of an engine in another Python environment: `wiring.engine.make_remote` starts it to make the engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fovea import __version__
from fovea.config.backends import StreamedEngine as StreamedSettings
from fovea.config.model import Model
from fovea.config.run import Config
from fovea.errors import EngineError
from fovea.models.processor import load_processor
from fovea.processes.serving import begin, refuse, serve_parent
from fovea.types import Completion, Request
from fovea.utils.tensor_records import opened
from fovea.weights.base import SyncedEngine
from fovea.wiring.engine import make_streamed
from fovea.wiring.interpreter import set_threads
from fovea_gym.errors import ConfigError, FoveaError, first_line, named
from fovea_gym.utils.event_loop import wait_for


class RequestTasks:
    """An engine in this process, with the methods that the trainer calls instead of the engine's."""

    def __init__(self, engine: SyncedEngine) -> None:
        self.engine = engine
        self._running: dict[str, asyncio.Task[Any]] = {}
        """The running call of each request, by request id."""

    async def generate(self, request: Request) -> Sequence[Completion]:
        """Sample n completions of one prompt; EngineError if `abort` ends it."""
        # runs in the task of this call: a separate task might begin after the next call, such as `sleep`
        drawing = asyncio.current_task()
        assert drawing is not None, "a coroutine runs in a task"
        self._running[request.id] = drawing
        try:
            return await self.engine.generate(request)
        except asyncio.CancelledError as error:
            raise EngineError("the request was aborted") from error
        finally:
            # a request with the same id may have arrived while this one was being aborted
            if self._running.get(request.id) is drawing:
                del self._running[request.id]

    async def abort(self, request: str) -> None:
        """Cancel a call of `generate`, and return once the engine has dropped it."""
        if drawing := self._running.get(request):
            drawing.cancel()
            await asyncio.wait([drawing])

    async def has_weights(self) -> bool:
        """True if the engine holds all weights."""
        return self.engine.has_weights

    async def receive_weights(self, written: bytes) -> None:
        """Load a part of the weights, which arrives as handles of the trainer's memory."""
        # tensors in GPU memory are copied, since handles of another process's memory cannot be passed on
        tensors = ((name, tensor.clone() if tensor.is_cuda else tensor) for name, tensor in opened(written))
        self.engine.receive_weights(list(tensors))

    async def close(self) -> None:
        """End the engine; this process ends afterwards."""
        await self.engine.close()


def _make(sent: Mapping[str, Any]) -> SyncedEngine:
    if sent["version"] != __version__:
        raise ConfigError(f"it has Fovea {__version__}, and the trainer {sent['version']}; install that version")
    with named(lambda error: ConfigError(f"the settings do not fit there ({first_line(error)})")):
        config, model = Config.model_validate(sent["config"]), Model.model_validate(sent["model"])
    set_threads(config)
    if sent["gpu"] is not None:
        torch.cuda.set_device(sent["gpu"])
    settings = config.rollout.engine
    assert isinstance(settings, StreamedSettings)
    return make_streamed(config, settings, model, load_processor(model))


def main(arguments: Sequence[str], make: Callable[[Mapping[str, Any]], SyncedEngine] = _make) -> None:
    """Make the engine that the first message describes, and serve the trainer until it or the engine ends."""
    connection, sent = begin(int(arguments[0]))
    try:
        engine = make(sent)
    except FoveaError as error:
        refuse(connection, error)
        return
    wait_for(serve_parent(RequestTasks(engine), connection))


if __name__ == "__main__":
    main(sys.argv[1:])
