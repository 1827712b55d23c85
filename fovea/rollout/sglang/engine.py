"""SGLang behind the `Engine` protocol, in its own processes: continuous batching, paged KV cache, prefix cache.

The completions of a group share their prompt by SGLang's radix cache, and so do the turns of an episode.
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
"""SGLang's names of the memory that it can free."""
ABORT_SECONDS = 60.0
"""Longest wait for the ends of requests that were cancelled."""


class SglangEngine:
    """Samples completions with SGLang, which has its own weights."""

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
        """Ids of the requests whose callers wait."""
        self._given_up: set[Future[Any]] = set()
        """Ends of requests whose callers have gone."""
        self._freed: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return "sglang"

    async def generate(self, request: Request) -> Sequence[Completion]:
        """Sample n completions of one prompt; EngineError when they cannot fit, or while asleep."""
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

        The weight sync after the update brings the weights back: nothing is kept of them.
        """
        self._check_idle("sleep was called")
        if not self._readiness.asleep:
            self._readiness.lose_weights(NO_WEIGHTS)
            self._weights.forget()
            self._free(WEIGHTS, CACHE, GRAPHS)
        self._readiness.asleep = True

    async def wake(self) -> None:
        """Accept requests again; EngineError if no weights were sent since `sleep` freed them."""
        if self._readiness.asleep:
            self._readiness.check_wakes()
            self._allocate(CACHE, GRAPHS)
        self._readiness.asleep = False

    def check_processes(self) -> None:
        """Raise LostEngineError if the engine's process has ended."""
        self.process.check()

    async def close(self) -> None:
        """Cancel running requests and end SGLang's processes."""
        self._readiness.lose_weights(CLOSED)
        self.process.close()

    @property
    def has_weights(self) -> bool:
        """True if SGLang holds all weights, so that a weight sync may bring only changed weights."""
        return self._weights.are_complete

    def begin_sync(self, shapes: Mapping[str, Shape]) -> None:
        """Prepare for weights of these names and shapes, adapters merged; requests are refused until `finish_sync`.

        EngineError, and nothing changed, while requests run, or if they are not those that SGLang was started from.
        """
        self._check_idle("new weights arrived")
        self._weights.check(shapes)
        self._readiness.lose_weights(BROKEN_SYNC)
        self._allocate(WEIGHTS)
        self._weights.begin()

    def receive_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Load some of them in place."""
        self._weights.take(bucket)

    def finish_sync(self, version: int) -> None:
        """Compare every value with what was sent, and empty every cache made with older weights."""
        self._weights.finish()
        self._readiness.version = version

    def _free(self, *memory: str) -> None:
        self.process.run("release", memory)
        self._freed |= frozenset(memory)

    def _allocate(self, *memory: str) -> None:
        """Allocate what of this was freed, once: SGLang fails at what it already has."""
        if freed := [each for each in memory if each in self._freed]:
            self.process.run("restore", freed)
            self._freed -= frozenset(freed)

    def _check_idle(self, call: str) -> None:
        """Raise EngineError while requests run; wait for the ends of those whose callers have gone."""
        check_idle(call, len(self._running))
        self._given_up = wait(self._given_up, ABORT_SECONDS).not_done
        if self._given_up:
            raise EngineError(
                f"{call}, but SGLang has not ended {len(self._given_up)} cancelled requests within "
                f"{ABORT_SECONDS:g} s; start again to continue from the last checkpoint"
            )
