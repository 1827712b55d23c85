"""vLLM's workers in processes of their own, and what a call of theirs means where one has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from fovea.errors import LostEngineError


@contextmanager
def workers_of(llm: LLMEngine) -> Iterator[None]:
    """Block in which calls reach vLLM's workers; LostEngineError where one of them has ended, before or meanwhile."""
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
            "a worker process of vLLM has ended, with it the engine; its own messages are above; start again to go on "
            "from the last checkpoint (max_restarts does)"
        ) from cause
