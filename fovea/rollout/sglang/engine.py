"""SGLang in separate processes as an `Engine`: continuous batching, paged KV cache, prefix cache.

Through SGLang's radix cache, the completions of a group share their prompt, and the turns of an episode their history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from torch import Tensor

from fovea.errors import EngineError
from fovea.processes.engine_process import EngineProcess
from fovea.rollout.outputs import CompletionText, EngineOutput, completions
from fovea.rollout.server import BROKEN_SYNC, CLOSED, NO_WEIGHTS, Readiness, check_idle
from fovea.rollout.sglang.inputs import SglangTranslator
from fovea.rollout.sglang.weights import SglangWeights
from fovea.types import Completion, Request, Shape

WEIGHTS, CACHE, GRAPHS = "weights", "kv_cache", "cuda_graph"
"""SGLang's names for the memory that it can free."""
ABORT_SECONDS = 60.0
"""Maximum time to wait for cancelled requests to end."""


class SglangEngine:
    """Samples completions with SGLang in separate processes, which has its own weights."""

    def __init__(
        self,
        process: EngineProcess,
        weights: SglangWeights,
        translator: SglangTranslator,
        text: CompletionText,
        *,
        max_model_len: int,
        max_images: int,
    ) -> None:
        self.process = process
        self._weights = weights
        self.translator = translator
        self._text = text
        self._readiness = Readiness(max_model_len=max_model_len, max_images=max_images)
        self._running: set[str] = set()
        """Ids of the requests whose callers are waiting."""
        self._given_up: set[Future[Any]] = set()
        """Futures of requests whose callers were cancelled."""
        self._freed: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return "sglang"

    async def generate(self, request: Request) -> Sequence[Completion]:
        """Sample n completions of one prompt; EngineError if they cannot fit, or while the engine is asleep."""
        self._readiness.check(request)
        drawing = self.process.call("generate", request.id, self.translator.sample_inputs(request))
        self._running.add(request.id)
        try:
            sampled: EngineOutput = await asyncio.wrap_future(drawing)
        finally:
            self._running.discard(request.id)
            if not drawing.done():
                # its caller was cancelled
                self._given_up.add(drawing)
                self.process.call("abort", request.id)
        return completions(request, sampled, self._text, version=self._readiness.sampled_with)

    async def sleep(self) -> None:
        """Free weights and KV cache for the update; EngineError while requests run.

        No copy of the weights is kept, since the weight sync after the update sends them again.
        """
        self._check_idle("sleep was called")
        if not self._readiness.asleep:
            self._readiness.lose_weights(NO_WEIGHTS)
            self._weights.forget()
            self._free(WEIGHTS, CACHE, GRAPHS)
        self._readiness.asleep = True

    async def wake(self) -> None:
        """Accept requests again; EngineError if the weights have not been sent since `sleep` freed them."""
        if self._readiness.asleep:
            self._readiness.check_wakes()
            self._allocate(CACHE, GRAPHS)
        self._readiness.asleep = False

    def check_processes(self) -> None:
        """Raise LostEngineError if the engine's process has ended."""
        self.process.check()

    async def close(self) -> None:
        """Cancel running requests and stop SGLang's processes."""
        self._readiness.lose_weights(CLOSED)
        self.process.close()

    @property
    def has_weights(self) -> bool:
        """True if SGLang holds all weights, so that a weight sync may send only changed ones."""
        return self._weights.are_complete

    def begin_sync(self, shapes: Mapping[str, Shape]) -> None:
        """Prepare for weights of these names and shapes, adapters merged; requests are refused until `finish_sync`.

        Raises EngineError, without any change, while requests run or if the weights do not match SGLang's checkpoint.
        """
        self._check_idle("new weights arrived")
        self._weights.check(shapes)
        self._readiness.lose_weights(BROKEN_SYNC)
        self._allocate(WEIGHTS)
        self._weights.begin()

    def receive_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Load a bucket of weights in place."""
        self._weights.take(bucket)

    def finish_sync(self, version: int) -> None:
        """Compare all weights with those sent, and empty all caches made with older ones."""
        self._weights.finish()
        self._readiness.version = version

    def _free(self, *memory: str) -> None:
        self.process.run("release", memory)
        self._freed |= frozenset(memory)

    def _allocate(self, *memory: str) -> None:
        """Allocate the parts of this memory that were freed; SGLang fails if they are already allocated."""
        if freed := [each for each in memory if each in self._freed]:
            self.process.run("restore", freed)
            self._freed -= frozenset(freed)

    def _check_idle(self, call: str) -> None:
        """Raise EngineError while requests run; wait for cancelled requests to end."""
        check_idle(call, len(self._running))
        self._given_up = wait(self._given_up, ABORT_SECONDS).not_done
        if self._given_up:
            raise EngineError(
                f"{call}, but SGLang has not ended {len(self._given_up)} cancelled requests within "
                f"{ABORT_SECONDS:g} s; start again to continue from the last checkpoint"
            )
