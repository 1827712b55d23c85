"""vLLM in this process as an `Engine`: continuous batching, paged KV cache, prefix cache.

Through the prefix cache, the completions of a group share their prompt, and the turns of an episode their history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from fovea.errors import EngineError, LostEngineError
from fovea.rollout.outputs import CompletionText, EngineOutput, Sampled, completions
from fovea.rollout.server import BROKEN_SYNC, CLOSED, NO_WEIGHTS, Readiness, check_idle
from fovea.rollout.vllm.inputs import VllmTranslator
from fovea.rollout.vllm.weights import VllmWeights
from fovea.rollout.vllm.worker import REQUEST, VllmAdapter
from fovea.types import Completion, Request, Shape
from fovea_gym.errors import first_line, named


@contextmanager
def workers_of(llm: LLMEngine) -> Iterator[None]:
    """Context manager for calls to vLLM's workers; LostEngineError if one has ended before or during the call."""
    _check(llm, None)
    try:
        yield
    except (RuntimeError, OSError, AssertionError) as error:
        _check(llm, error)
        raise


def _check(llm: LLMEngine, cause: Exception | None) -> None:
    executor = llm.engine_core.engine_core.model_executor
    if isinstance(executor, MultiprocExecutor) and executor.is_failed:
        raise LostEngineError(
            "a worker process of vLLM has ended, and with it the engine; its messages are above; start again to "
            "continue from the last checkpoint (max_restarts does so automatically)"
        ) from cause


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waiting:
    """A request that vLLM is serving, and the future that its caller awaits."""

    request: Request
    done: asyncio.Future[Sequence[Completion]]


class VllmEngine:
    """Samples completions with vLLM in this process, which has its own weights."""

    def __init__(
        self,
        llm: LLMEngine,
        translator: VllmTranslator,
        text: CompletionText,
        *,
        max_images: int,
        adapter: VllmAdapter | None = None,
    ) -> None:
        """`adapter` receives the adapters of weight syncs; without it, weight syncs send merged weights."""
        self.llm = llm
        self._weights = VllmWeights(llm)
        self._adapter = adapter
        self.translator = translator
        self._text = text
        self._readiness = Readiness(max_model_len=llm.model_config.max_model_len, max_images=max_images)
        self._frees_memory: bool = llm.model_config.enable_sleep_mode
        self._waiting: dict[str, Waiting] = {}
        self._runner: asyncio.Task[None] | None = None
        self._syncs_base = False
        """True if the current weight sync sends base weights, not only an adapter."""

    @property
    def name(self) -> str:
        return "vllm"

    async def generate(self, request: Request) -> Sequence[Completion]:
        """Sample n completions of one prompt; EngineError if they cannot fit, or while the engine is asleep."""
        self._readiness.check(request)
        waiting = Waiting(request=request, done=asyncio.get_running_loop().create_future())
        with named(lambda error: EngineError(f"vLLM refuses request {request.id}: {first_line(error)}")):
            prompt, sampling = self.translator.prompt(request.prompt), self.translator.sampling(request)
            lora = None if self._adapter is None else REQUEST
            self.llm.add_request(request.id, prompt, sampling, lora_request=lora)
        self._waiting[request.id] = waiting
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        try:
            return await waiting.done
        finally:
            # if the caller was cancelled, vLLM still has the request
            if self._waiting.pop(request.id, None) is not None:
                self.llm.abort_request([request.id])

    async def sleep(self) -> None:
        """On a GPU, free weights and KV cache for the update; EngineError while requests run.

        No copy of the weights is kept, since the weight sync after the update sends them again.
        """
        check_idle("sleep was called", len(self._waiting))
        if self._frees_memory and not self._readiness.asleep:
            self.llm.sleep(level=2)
            self._readiness.lose_weights(NO_WEIGHTS)
            self._weights.forget()
            if self._adapter is not None:
                self._adapter.forget()
        self._readiness.asleep = True

    async def wake(self) -> None:
        """Accept requests again; EngineError if the weights were freed and have not been sent since."""
        if self._readiness.asleep and self._frees_memory:
            self._readiness.check_wakes()
            self.llm.wake_up(["kv_cache"])
        self._readiness.asleep = False

    def check_processes(self) -> None:
        """Raise LostEngineError if a worker process of vLLM has ended."""
        with workers_of(self.llm):
            pass

    async def close(self) -> None:
        """Cancel running requests and shut vLLM down."""
        if self._runner is not None and not self._runner.done():
            self._runner.cancel()
            await asyncio.wait([self._runner])
        self._readiness.lose_weights(CLOSED)
        self.llm.engine_core.shutdown()

    @property
    def has_weights(self) -> bool:
        """True if vLLM holds all weights, so that a weight sync may send only changed ones."""
        return self._weights.are_complete and (self._adapter is None or self._adapter.is_complete)

    def begin_sync(self, shapes: Mapping[str, Shape]) -> None:
        """Prepare for weights of these names and shapes; requests are refused until `finish_sync`.

        Raises EngineError, without any change, while requests run or if the weights do not match vLLM's checkpoint.
        """
        check_idle("new weights arrived", len(self._waiting))
        base = shapes
        if self._adapter is not None:
            base = {name: shape for name, shape in shapes.items() if not is_adapter(name)}
        # with an adapter, base weights are sent only once
        brings_base = bool(base) or not self._weights.are_complete
        if brings_base:
            self._weights.check(base)
        if self._adapter is not None:
            # this check, too, must come before any change
            self._adapter.begin({name: shape for name, shape in shapes.items() if is_adapter(name)})
        with workers_of(self.llm):
            if self._readiness.asleep and self._frees_memory and self._readiness.version is None:
                self.llm.wake_up(["weights"])
            if brings_base:
                self._weights.begin()
        self._syncs_base = brings_base
        self._readiness.lose_weights(BROKEN_SYNC)

    def receive_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Load a bucket of weights in place."""
        base = [each for each in bucket if self._adapter is None or not is_adapter(each[0])]
        if base:
            with workers_of(self.llm):
                self._weights.take(base)
        if self._adapter is not None:
            self._adapter.take([each for each in bucket if is_adapter(each[0])])

    def finish_sync(self, version: int) -> None:
        """Compare all weights with those sent, and empty all caches made with older ones."""
        with workers_of(self.llm):
            if self._syncs_base:
                self._weights.finish()
            # after the base weights, since vLLM drops its adapters when those change
            if self._adapter is not None:
                self._adapter.finish()
            self._empty_caches()
        self._readiness.version = version

    def _empty_caches(self) -> None:
        """Empty the prefix cache, the cache of processed images and the cache of image features."""
        if not self.llm.reset_prefix_cache():
            raise EngineError(
                "vLLM did not empty its prefix cache after a weight sync, and would continue prompts with keys and "
                "values of older weights; run again, and report this as a bug if it happens again"
            )
        self.llm.reset_mm_cache()
        self.llm.reset_encoder_cache()

    async def _run(self) -> None:
        """Step vLLM until no request is left; a failure is raised in every waiting caller."""
        try:
            while self._waiting:
                await asyncio.sleep(0)  # lets callers queue up, so that their prompts are prefilled together
                with workers_of(self.llm):
                    outputs = self.llm.step()
                for output in outputs:
                    self._answer(output)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _answer(self, output: Any) -> None:
        """Return a finished request's completions to its caller."""
        waiting = self._waiting.pop(output.request_id, None)
        if waiting is None or waiting.done.done():
            return  # its caller was cancelled
        try:
            waiting.done.set_result(self._completions(waiting.request, output))
        except EngineError as error:
            waiting.done.set_exception(error)

    def _fail(self, error: BaseException) -> None:
        """Raise an error in every waiting caller."""
        waiting, self._waiting = self._waiting, {}
        self.llm.abort_request(list(waiting))
        for each in waiting.values():
            if not each.done.done():
                each.done.set_exception(error)

    def _completions(self, request: Request, output: Any) -> list[Completion]:
        sampled = EngineOutput(prompt_ids_L=output.prompt_token_ids, completions=dict(map(_sampled, output.outputs)))
        return completions(request, sampled, self._text, version=self._readiness.sampled_with)


def _sampled(output: Any) -> tuple[int, Sampled]:
    """Convert one of a request's outputs in vLLM; returns it with its index."""
    token_ids = list(output.token_ids)
    assert token_ids == output.logprobs.token_ids, "the log-probs belong to other tokens"
    logprobs = output.logprobs.logprobs
    return output.index, Sampled(token_ids=token_ids, logprobs=logprobs, finish_reason=output.finish_reason)


def is_adapter(name: str) -> bool:
    """True if this is the name of an adapter's weight."""
    return ".lora_" in name
