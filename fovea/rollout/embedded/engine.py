"""The embedded engine: continuous batching in the trainer's process, with the trainer's own tensors.

A prompt's images are encoded once and the prompt is prefilled once, for its n completions and for equal prompts that
are admitted together with it. A completion depends only on its own request: random numbers come from the request's
seed, and attention never crosses rows.

`scheduler` decides which requests run next, and `memory` what memory the engine keeps and when it frees it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from fovea.errors import EngineError
from fovea.models.activation_tape import Tape
from fovea.models.decoder import decoder_shape
from fovea.models.processor import Processor
from fovea.models.trainable import adapter_scale, factored_weights
from fovea.models.vlm import VLM
from fovea.rollout.base import memory_for_rollout
from fovea.rollout.embedded.batch import DecodeBatch, Forward, completion_of
from fovea.rollout.embedded.cache import Cache
from fovea.rollout.embedded.linears import (
    HEAD,
    Int8Linears,
    Make,
    NamedWeights,
    OneDnnLinears,
    PlainLinears,
    TextWeights,
    text_weights,
)
from fovea.rollout.embedded.memory import EngineMemory, PoolMemory
from fovea.rollout.embedded.prefill import PrefillWork, prefill, prefill_row
from fovea.rollout.embedded.recorder import Recorder
from fovea.rollout.embedded.requests import QueuedRequest, as_one, by_prompt
from fovea.rollout.embedded.scheduler import Scheduler
from fovea.rollout.embedded.tuning import INT8, Tuning, make_stepper, uses_pages
from fovea.rollout.outputs import CompletionText
from fovea.types import Completion, Metrics, Request, Weights

DEFAULT_TUNING = Tuning()


class EmbeddedEngine:
    """Samples completions with the trainer's own tensors, in its process."""

    def __init__(
        self,
        vlm: VLM,
        processor: Processor,
        *,
        max_batch_tokens: int | None,
        tape: Tape | None = None,
        tuning: Tuning = DEFAULT_TUNING,
        synced: Collection[str] = (),
        can_free_memory: bool = False,
    ) -> None:
        """Without `max_batch_tokens`, the size of the KV cache on a GPU follows the free memory.

        `tape` records activations for the update; a tape of linear outputs needs `tuning.keeps_outputs_in_order`.
        `synced` names the weights whose memory `sleep` may free: copies of the policy's that every weight sync sends.
        With `can_free_memory`, an update that runs out of memory calls `free_memory` and continues.
        """
        if tape is not None and tape.holds_linears and not tuning.keeps_outputs_in_order:
            raise ValueError(
                "a tape of linear outputs needs exact decoding over the dense cache with a wait at every step; leave "
                "int8_decoding, cache and decode_steps_per_wait of Tuning unset, or pass a tape without widths"
            )
        self._vlm = vlm
        self._tape = tape
        self._recorder = Recorder(vlm, tape)
        self._max_batch_tokens = max_batch_tokens
        self._tuning = tuning
        self._shape = decoder_shape(vlm.text_config)
        self._text = CompletionText(processor.tokenizer, processor.stop_ids)
        self._device = vlm.device
        self._stop_ids = torch.tensor(processor.stop_ids, dtype=torch.long, device=self._device)
        self._weights: TextWeights | None = None
        self._named = NamedWeights(tensors={})
        # a CUDA graph reads the weights at the addresses of its capture
        self._addresses: tuple[int, ...] = ()
        self._version = 0
        self._prefill_work = PrefillWork(vlm.family.work)
        self._may_approximate = True
        """True if all running requests allow approximate weights."""
        self._asleep = False
        copied = [weight for name, weight in self.own_weights() if name in synced]
        pool = PoolMemory(
            vlm.device if uses_pages(tuning, self._shape, vlm.device, vlm.dtype) else None,
            max_batch_tokens,
            sum(weight.nbytes for weight in copied),
            can_free_memory=can_free_memory,
        )
        self.memory = EngineMemory(tuning, self._shape, pool, copied)
        self._scheduler = Scheduler(tuning.pass_tokens)
        self._worker: asyncio.Task[None] | None = None

    async def generate(self, request: Request) -> Sequence[Completion]:
        """Sample n completions of one prompt; EngineError if they exceed the token budget, or while asleep."""
        if self._asleep:
            raise EngineError("a request reached an engine that is asleep; call wake first")
        prompt = request.prompt
        positions_3L, first_position = self._vlm.family.positions(prompt.token_ids_L, prompt.images, 0)
        queued = QueuedRequest(
            request=request,
            done=asyncio.get_running_loop().create_future(),
            positions_3L=positions_3L,
            first_position=first_position,
        )
        with memory_for_rollout(self._max_batch_tokens):
            needed = self.memory.ready_cache(self._loaded_weights().embed).cost(queued)
            if needed > self.memory.tokens:
                raise EngineError(
                    f"a prompt of {prompt.num_tokens} tokens with {request.n} completions of up to "
                    f"{request.sampling.max_new_tokens} needs {needed} cache tokens, but rollout.engine."
                    f"max_batch_tokens={self.memory.tokens}; raise it, or lower rollout.samples_per_prompt or "
                    "rollout.max_new_tokens"
                )
            self._scheduler.submit(queued)
            if not self._busy:
                self._worker = asyncio.create_task(self._run())
            return await queued.done

    async def sleep(self) -> None:
        """Free memory for the update (`EngineMemory.free_for_update`); EngineError while requests run."""
        if self._busy:
            raise EngineError("sleep was called while the engine is generating completions; await them first")
        self.memory.free_for_update()
        self._asleep = True

    def free_memory(self) -> bool:
        """Free memory that only the next rollout needs; returns False if there is none, or while requests run."""
        if self.memory.cache is None or self._busy:
            return False
        self.memory.free_all(copied_weights=self._asleep)
        return True

    async def wake(self) -> None:
        """Accept requests again; EngineError if weights were freed and have not been sent since."""
        if not self.memory.has_copied_weights:
            raise EngineError("wake was called before the weights that sleep freed were sent; run a weight sync first")
        # version 0 belongs to the warm-up, whose updates need less memory
        if self._asleep and self._version:
            self.memory.measure_update()
        self._asleep = False

    async def close(self) -> None:
        """Cancel running requests and free all memory."""
        if self._worker is not None and self._busy:
            self._worker.cancel()
            await asyncio.wait([self._worker])
        self.memory.free_all()
        self._weights, self._named = None, NamedWeights(tensors={})

    @property
    def name(self) -> str:
        return f"embedded {INT8}" if self._tuning.int8_decoding else "embedded"

    @property
    def _busy(self) -> bool:
        return self._worker is not None and not self._worker.done()

    @property
    def repeats_in_rounds(self) -> bool:
        """True on a CPU, where the rounding of a matrix product depends on its number of rows (`schedule`)."""
        return self._device.type == "cpu"

    def own_weights(self) -> Weights:
        """Return the tensors of the network, named by `models.trainable.factored_weights`."""
        return ((name, weight.detach()) for name, weight in factored_weights(self._vlm.network))

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Keep references to the language model's tensors, and copy the vision tower's unless they are shared."""
        if self._busy:
            raise EngineError("new weights arrived while the engine is generating completions; await them first")
        # buffers are never trained, and weight syncs do not send them
        named = dict(self._vlm.network.named_buffers()) | dict(weights)
        own = dict(factored_weights(self._vlm.network))
        language = self._vlm.family.language_path
        with torch.no_grad():
            for name, tensor in weights.items():
                if not name.startswith((f"{language}.", HEAD)) and own[name].data_ptr() != tensor.data_ptr():
                    named[name] = own[name].copy_(tensor)
        self._named = NamedWeights(
            tensors=named, adapter_scale=adapter_scale(self._vlm.network), language_path=language
        )
        self._weights = text_weights(self._named, self._shape, self._tape)
        self._version = version
        self._recorder.restart()
        addresses = tuple(tensor.data_ptr() for tensor in named.values())
        self.memory.free_stale(moved=addresses != self._addresses)
        self._addresses = addresses

    def prefill_metrics(self) -> Metrics:
        """Return the metrics of the prefill since the last call."""
        return self._prefill_work.take()

    async def _run(self) -> None:
        """Serve the queue until it is empty; a failure is raised in every waiting caller."""
        cache = self.memory.ready_cache(self._loaded_weights().embed)
        batch = DecodeBatch(self._device, self._stop_ids, self._vlm.banned_K, self._text)
        try:
            while self._scheduler:
                await asyncio.sleep(0)  # lets callers queue up, so that their prompts are prefilled together
                self._admit(batch, cache)
                self._decode(batch, cache)
        except BaseException as error:
            self._scheduler.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self.memory.free_idle()

    @torch.no_grad()
    def _admit(self, batch: DecodeBatch, cache: Cache) -> None:
        """Prefill the queued requests that fit; then resume preempted rows, and sample first tokens of new rows."""
        admitted = self._scheduler.admit(cache, self.memory.turns)
        if not admitted:
            return
        preempted = [request.preempted for request in admitted if request.preempted is not None]
        resumed, new = admitted[: len(preempted)], admitted[len(preempted) :]
        alone = not batch.rows and not resumed
        if resumed:
            self._prefill([[each] for each in resumed], cache, Recorder(self._vlm, None), alone=alone)
            batch.resume(preempted)
        if new:
            groups = by_prompt(new)
            logits_PW = self._prefill(groups, cache, self._recorder, alone=alone)
            batch.add(groups, logits_PW)
            # a first token may already be a stop token, or the only one allowed
            self._retire(batch, cache)
        self._may_approximate = not self._scheduler.needs_exact

    def _prefill(
        self, groups: Sequence[Sequence[QueuedRequest]], cache: Cache, recorder: Recorder, *, alone: bool
    ) -> Tensor:
        """Run the prompt of each group; returns the logits [P, W] of the tokens after the prompts."""
        weights, requests = self._loaded_weights(), [as_one(group) for group in groups]
        row = prefill_row(self._vlm, weights, requests, recorder.features(requests, alone=alone))
        hidden_PE = prefill(row, weights, self._shape, requests, cache, recorder, self._tuning.pass_tokens)
        for request in requests:
            self._prefill_work.add(request)
        for request in chain.from_iterable(groups):
            request.kept = None
        return weights.logits(hidden_PE)

    @torch.no_grad()
    def _decode(self, batch: DecodeBatch, cache: Cache) -> None:
        """Run the decode steps until the next wait, then remove finished rows."""
        if not batch.rows:
            return
        # finished rows keep running until the wait: that changes no keys that are read, but would advance their states
        steps = 1 if cache.states is not None else self._tuning.decode_steps_on(self._device)
        self._scheduler.make_room(batch, cache, steps)
        stepper = self._ready_stepper(len(batch), cache)
        for _ in range(steps):
            with self._recorder.recording(len(batch)) as first_place:
                batch.step(stepper, first_place)
        self._retire(batch, cache)

    def _ready_stepper(self, rows: int, cache: Cache) -> Forward:
        """Stepper with the fastest linear layers for this number of rows; 8-bit ones only if all requests allow it."""
        weights = self._loaded_weights()
        linears: Make = PlainLinears
        # one decode step serves all rows, so a single exact request makes all of them exact
        if self._tuning.int8_decoding and self._may_approximate:
            linears = Int8Linears
        # chosen only by the number of rows, so that a resumed run decodes with the same kernel
        elif self._tuning.uses_onednn(rows, weights.embed):
            linears = OneDnnLinears
        steppers = self.memory.steppers
        if linears not in steppers:
            if linears is not PlainLinears:
                weights = text_weights(self._named, self._shape, self._tape, linears)
            steppers[linears] = make_stepper(self._vlm, weights, self._shape, cache)
        return steppers[linears]

    def _retire(self, batch: DecodeBatch, cache: Cache) -> None:
        """Wait to see which rows have finished, remove them, and answer completed requests."""
        finished = batch.wait_for_finished()
        if not finished:
            return
        self.memory.keep_turns(batch, cache, finished)
        cache.remove(finished)
        for removed in batch.remove(finished):
            completion = completion_of(removed, self._text, self._version)
            self._recorder.record_trace(completion.id, removed)
            self._scheduler.finish(removed.row, completion)

    def _loaded_weights(self) -> TextWeights:
        if self._weights is None:
            raise EngineError("the engine has no weights; call load_weights first")
        return self._weights
