"""The process that runs SGLang's engine: `python -P -m fovea.rollout.sglang.host DESCRIPTOR`.

SGLang's engine takes over the process that creates it. It replaces the event loop policy and the multiprocessing start
method, kills the process when one of its workers fails, and kills all children of the process when it shuts down. The
trainer has other children, such as graders and loggers, and must report why it ends: so the engine gets this process.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from sglang.srt.entrypoints.engine import Engine as SglangEngine
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    GenerateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)

from fovea.processes.serving import begin, serve_parent
from fovea.rollout.outputs import EngineOutput, Sampled
from fovea.rollout.sglang.inputs import SampleInputs
from fovea.rollout.sglang.scheduler import run_scheduler

IDLE_SECONDS = 60.0
"""Maximum time to wait for the scheduler to clean up finished requests."""


class SeededEngine(SglangEngine):  # type: ignore[misc]
    """SGLang's engine with schedulers that sample by seed and compare weights (`rollout.sglang.scheduler`)."""

    run_scheduler_process_func = staticmethod(run_scheduler)


class Host:
    """Methods of the engine that the trainer may call."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._ids: dict[str, list[str]] = {}
        """By request name, SGLang's ids of the completions that are being sampled."""
        self._is_syncing = False

    async def generate(self, request: str, sample_inputs: Sequence[SampleInputs]) -> EngineOutput:
        """Sample completions of one prompt, which is prefilled once; `request` is their name for `abort`.

        The prompt is prefilled by a separate first request, since requests that start together would each prefill it.
        """
        self._ids[request] = [drawing["rid"] for drawing in sample_inputs]
        try:
            if len(sample_inputs) > 1:
                first = sample_inputs[0]
                nothing = {**first["sampling_params"], "max_new_tokens": 0, "min_new_tokens": 0}
                await self._output({**first, "rid": f"{first['rid']}/prompt", "sampling_params": nothing})
            if request not in self._ids:
                raise RuntimeError("the request was aborted")
            outputs = await asyncio.gather(*map(self._output, sample_inputs))
            return EngineOutput(
                prompt_ids_L=outputs[0]["prompt_token_ids"], completions=dict(enumerate(map(_sampled, outputs)))
            )
        finally:
            self._ids.pop(request, None)

    async def abort(self, request: str) -> None:
        """Abort a call of `generate`, which then returns the tokens sampled so far."""
        for rid in self._ids.pop(request, []):
            self._manager.abort_request(rid)

    async def release(self, tags: Sequence[str]) -> None:
        """Free memory under SGLang's names, once all requests have ended; its contents are lost."""
        # a scheduler that is asked to free memory in the same step in which it finished a request would exit
        await self._empty_caches()
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=list(tags)))

    async def restore(self, tags: Sequence[str]) -> None:
        """Allocate again the memory that `release` freed."""
        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=list(tags)))

    async def begin_sync(self) -> None:
        """Prepare for new weights; a weight sync that failed before is ended first."""
        if self._is_syncing:
            await self._end_sync()
        _check(await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))
        self._is_syncing = True

    async def receive_weights(self, payloads: Sequence[bytes]) -> None:
        """Load a bucket of weights, given as one payload for each worker."""
        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=list(payloads), flush_cache=False)
        _check(await self._manager.update_weights_from_tensor(request, None))

    async def finish_sync(self, sent: str) -> None:
        """End a weight sync, compare the workers' weights with those sent (`scheduler.compare`), and empty caches."""
        await self._end_sync()
        # this call blocks the loop, on which nothing else is running now
        self._engine.collective_rpc("compare", sent=sent)
        await self._empty_caches()

    async def close(self) -> None:
        """Stop all other processes of the engine; this one ends when its event loop does."""
        self._engine.shutdown()

    async def _end_sync(self) -> None:
        _check(await self._manager.end_weight_update(EndWeightUpdateReqInput(), None))
        self._is_syncing = False

    async def _empty_caches(self) -> None:
        """Empty all caches, once the scheduler has cleaned up the last requests."""
        flushed = await self._manager.flush_cache(timeout_s=IDLE_SECONDS)
        _check((flushed.success, flushed.message))

    async def _output(self, drawing: SampleInputs) -> dict[str, Any]:
        output: dict[str, Any] = await anext(self._manager.generate_request(GenerateReqInput(**drawing), None))
        return output


def _sampled(output: Mapping[str, Any]) -> Sampled:
    about = output["meta_info"]
    chosen = about["output_token_logprobs"]
    ids = list(output["output_ids"])
    assert ids == [token for _, token, *_ in chosen], "the log-probs belong to other tokens"
    end = about["finish_reason"]
    return Sampled(
        token_ids=ids,
        logprobs=[logprob for logprob, *_ in chosen],
        finish_reason=f"{end['type']}: {end['message']}" if end.get("message") else end["type"],
    )


def _check(result: tuple[bool, str]) -> None:
    """Raise RuntimeError for a failure that SGLang returns instead of raising it."""
    success, message = result
    if not success:
        raise RuntimeError(message)


async def serve(engine: Any, connection: Connection) -> None:
    """Serve the trainer until it closes the connection or its process ends."""
    # on a CPU, SGLang runs the garbage collector whenever it frees caches, in every weight sync: exclude from it all
    # objects that exist now
    await engine.tokenizer_manager.freeze_gc()
    await serve_parent(Host(engine), connection, "SGLang: ")


def main(arguments: Sequence[str]) -> None:
    """Create the engine from the server arguments in the trainer's first message, and serve the trainer."""
    connection, server_arguments = begin(int(arguments[0]))
    engine = SeededEngine(**server_arguments)
    engine.loop.run_until_complete(serve(engine, connection))


if __name__ == "__main__":
    main(sys.argv[1:])
