"""The embedded engine: continuous batching in the trainer's process, on the trainer's own tensors.

The images of a prompt are encoded once and the prompt is prefilled once for its n completions, and for those of equal
prompts that are admitted with it. Requests wait in a queue and are admitted in their order while the KV cache has room
(`Cache.fits`); a finished completion frees its row and its cache at the next sync. Where pages run short, the youngest
completion gives its own up and waits at the head of the queue. A completion depends only on its own request: random
numbers come from the request's seed, and attention never crosses rows.
"""

from __future__ import annotations

import asyncio
from collections import deque
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
from fovea.rollout.embedded.decode_step import GraphStepper
from fovea.rollout.embedded.linears import (
    HEAD,
    Int8Linears,
    Make,
    NamedWeights,
    OneDnnLinears,
    TextWeights,
    text_weights,
)
from fovea.rollout.embedded.prefill import PrefillWork, prefill, prefill_row
from fovea.rollout.embedded.recorder import Recorder
from fovea.rollout.embedded.requests import KeptKeys, QueuedRequest, RemovedRow, as_one, by_prompt, resumption
from fovea.rollout.embedded.tuning import INT8, PoolMemory, Tuning, make_cache, make_stepper, uses_pages
from fovea.rollout.outputs import CompletionText
from fovea.types import Completion, Metrics, Request, Weights
from fovea_gym.utils.lru_cache import LRUCache

DEFAULT_TUNING = Tuning()
PREFILL_PASSES = 2
"""Forward passes' tokens of prompts that are admitted at once."""


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
        pushed: Collection[str] = (),
        can_give_way: bool = False,
    ) -> None:
        """`max_batch_tokens` None: by free memory on a GPU.

        `tape` records activations for the update; a tape of linear outputs needs `tuning.keeps_outputs_in_order`.
        `pushed` are the weights whose memory `sleep` may free: copies of the policy's, which every push brings.
        `can_give_way`: an update that runs out of memory calls `free_spare_memory` and goes on.
        """
        if tape is not None and tape.holds_linears and not tuning.keeps_outputs_in_order:
            raise ValueError(
                "a tape of linear outputs needs exact decoding over the dense cache with a sync at every step; leave "
                "int8_decoding, cache and decode_steps_per_sync of Tuning unset, or give a tape without widths"
            )
        self._vlm = vlm
        self._tape = tape
        self._recorder = Recorder(vlm, tape)
        self._max_batch_tokens = max_batch_tokens
        self._tuning = tuning
        self._pushed = [weight for name, weight in self.own_weights() if name in pushed]
        self._shape = decoder_shape(vlm.text_config)
        self._text = CompletionText(processor.tokenizer, processor.stop_ids)
        self._device = vlm.device
        has_pool = uses_pages(tuning, self._shape, vlm.device, vlm.dtype)
        copied_bytes = sum(weight.nbytes for weight in self._pushed)
        self._memory = PoolMemory(
            vlm.device if has_pool else None, max_batch_tokens, copied_bytes, can_give_way=can_give_way
        )
        self._stop_ids = torch.tensor(processor.stop_ids, dtype=torch.long, device=self._device)
        self._weights: TextWeights | None = None
        self._named = NamedWeights(tensors={})
        self._prefill_work = PrefillWork(vlm.family.work)
        self._may_approximate = True
        """True if all running requests accept approximate weights."""
        self._asleep = False
        # a CUDA graph reads the weights at the addresses of its capture
        self._addresses: tuple[int, ...] = ()
        self._cache: Cache | None = None
        self._stepper: Forward | None = None
        self._copies: dict[Make, Forward] = {}
        """Steppers on decode copies, by the kind of their linear layers."""
        self._version = 0
        self._queue: deque[QueuedRequest] = deque()
        self._running: dict[QueuedRequest, list[Completion | None]] = {}
        """Finished completions of each admitted request, oldest first; None for those that run or were preempted."""
        self._full = False
        """The next request of the queue does not fit until some rows finish."""
        self._kept: LRUCache[str, KeptKeys] = LRUCache(0)
        """KV cache of turns that another turn may continue, by completion id; its size is in tokens."""
        self._worker: asyncio.Task[None] | None = None

    async def generate(self, request: Request) -> Sequence[Completion]:
        """Sample n completions of one prompt; EngineError when they cannot fit the token budget, or while asleep."""
        if self._asleep:
            raise EngineError("a request to an engine that is asleep; call wake first")
        prompt = request.prompt
        positions_3L, first_position = self._vlm.family.positions(prompt.token_ids_L, prompt.images, 0)
        queued = QueuedRequest(
            request=request,
            done=asyncio.get_running_loop().create_future(),
            positions_3L=positions_3L,
            first_position=first_position,
        )
        with memory_for_rollout(self._max_batch_tokens):
            return await self._answer(queued)

    async def _answer(self, queued: QueuedRequest) -> Sequence[Completion]:
        request = queued.request
        needed = self._ready_cache().cost(queued)
        if needed > self._memory.tokens:
            raise EngineError(
                f"a prompt of {request.prompt.num_tokens} tokens with {request.n} completions of up to "
                f"{request.sampling.max_new_tokens} needs {needed} cache tokens, and rollout.engine.max_batch_tokens="
                f"{self._memory.tokens}; raise that, or lower rollout.samples_per_prompt or rollout.max_new_tokens"
            )
        self._queue.append(queued)
        if not self._busy:
            self._worker = asyncio.create_task(self._run())
        return await queued.done

    async def sleep(self) -> None:
        """Free memory for the update: pool, graphs and copied weights if they do not fit beside it (`PoolMemory`).

        EngineError while requests run.
        """
        if self._busy:
            raise EngineError("sleep was called while the engine is generating completions; await them first")
        if not self._memory.stays:
            self._free_memory()
            self._free_copies()
        self._forget_turns()
        self._free_decode_copies()
        # to the driver, whose free memory tells how much an update takes
        torch.cuda.empty_cache()
        self._asleep = True

    def free_spare_memory(self) -> bool:
        """Free what is kept for the next rollout only: pool and graphs, and the copied weights while asleep.

        False where that is nothing, or requests run.
        """
        if self._cache is None or self._busy:
            return False
        self._free_memory()
        if self._asleep:
            self._free_copies()
        return True

    async def wake(self) -> None:
        """Accept requests again; EngineError if weights were freed and not pushed since."""
        if not all(weight.untyped_storage().nbytes() for weight in self._pushed):
            raise EngineError("wake was called before the weights that sleep freed were pushed; push them first")
        # version 0 is that of the warm-up, whose updates take less
        if self._asleep and self._version:
            self._memory.measure_update(stayed=self._cache is not None)
        self._asleep = False

    async def close(self) -> None:
        """Cancel running requests and free all memory."""
        if self._worker is not None and self._busy:
            self._worker.cancel()
            await asyncio.wait([self._worker])
        self._free_memory()
        self._weights, self._named = None, NamedWeights(tensors={})

    @property
    def name(self) -> str:
        return f"embedded {INT8}" if self._tuning.int8_decoding else "embedded"

    @property
    def _busy(self) -> bool:
        return self._worker is not None and not self._worker.done()

    @property
    def repeats_in_rounds(self) -> bool:
        """True on a CPU (`schedule.RoundsByLoad`): the number of rows decides how a product of matrices is rounded."""
        return self._device.type == "cpu"

    def own_weights(self) -> Weights:
        """The tensors of the network, named by `models.trainable.factored_weights`."""
        return ((name, weight.detach()) for name, weight in factored_weights(self._vlm.network))

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take references to the language model's tensors; copy those of the vision tower unless they are shared."""
        if self._busy:
            raise EngineError("new weights while the engine is generating completions; await them first")
        # nothing trains a buffer, and no push has one
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
        self._free_decode_copies()
        self._version = version
        self._forget_turns()
        self._recorder.restart()
        addresses = tuple(tensor.data_ptr() for tensor in named.values())
        if addresses != self._addresses:
            self._free_memory()
        elif not isinstance(self._stepper, GraphStepper):
            # captured graphs survive an update in place: they read the same addresses; a plain stepper may hold tensors
            # of the older weights
            self._stepper = None
        self._addresses = addresses

    def _free_copies(self) -> None:
        for weight in self._pushed:
            # all tensors that share the storage stay valid, and a push fills it again
            weight.untyped_storage().resize_(0)

    def _free_memory(self) -> None:
        """Free the KV cache, captured graphs and decode copies."""
        self._cache = self._stepper = None
        self._forget_turns()
        self._free_decode_copies()

    def _forget_turns(self) -> None:
        self._kept = LRUCache(self._memory.kept_tokens)

    async def _run(self) -> None:
        """Serve the queue until it is empty; a failure reaches every caller."""
        cache = self._ready_cache()
        batch = DecodeBatch(self._device, self._stop_ids, self._vlm.banned_K, self._text)
        try:
            while self._queue or batch.rows:
                await asyncio.sleep(0)  # lets callers queue up, so that their prompts are prefilled together
                self._admit(batch, cache)
                self._decode(batch, cache)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            # the engine is idle: the update needs this memory
            cache.clear()
            self._free_decode_copies()

    def _fail(self, error: BaseException) -> None:
        """Raise an error in every waiting caller."""
        for request in (*self._queue, *self._running):
            # the future of a cancelled caller is done already
            if not request.done.done():
                request.done.set_exception(error)
        self._queue.clear()
        self._running.clear()
        self._full = False

    @torch.no_grad()
    def _admit(self, batch: DecodeBatch, cache: Cache) -> None:
        """Prefill the queued requests that fit; completions go on, or sample their first token."""
        admitted = self._take_fitting(cache)
        if not admitted:
            return
        preempted = [request.preempted for request in admitted if request.preempted is not None]
        # those that were preempted are older, and so the first
        resumed, new = admitted[: len(preempted)], admitted[len(preempted) :]
        alone = not batch.rows and not resumed
        if resumed:
            self._prefill([[each] for each in resumed], cache, Recorder(self._vlm, None), alone=alone)
            batch.resume(preempted)
        if new:
            self._running |= {request: [None] * request.n for request in new}
            groups = by_prompt(new)
            logits_PW = self._prefill(groups, cache, self._recorder, alone=alone)
            batch.add(groups, logits_PW)
            # a first token may already be a stop token, or the only one allowed
            self._retire(batch, cache)
        self._may_approximate = not any(request.sampling.exact for request in self._running)

    def _take_fitting(self, cache: Cache) -> list[QueuedRequest]:
        """Take the requests at the head of the queue that fit the cache, as many as are prefilled at once."""
        fitting: list[QueuedRequest] = []
        new_tokens = 0
        while self._queue and not self._full:
            request = self._queue[0].request
            # not before: a request that waits must not hold what is evicted meanwhile
            kept = None if request.continues is None else self._kept.get(request.continues)
            # features and states of all these prompts are in memory together
            new_tokens += request.prompt.num_tokens - (0 if kept is None else kept.num_tokens)
            if fitting and new_tokens > PREFILL_PASSES * self._tuning.pass_tokens:
                break
            # strictly first come, first served: a smaller request does not overtake, or a large one might wait forever
            self._full = not cache.fits([*fitting, self._queue[0]])
            if not self._full:
                self._queue[0].kept = kept
                fitting.append(self._queue.popleft())
        return fitting

    def prefill_metrics(self) -> Metrics:
        """Metrics of the prefill since the last call."""
        return self._prefill_work.take()

    def _prefill(
        self, groups: Sequence[Sequence[QueuedRequest]], cache: Cache, recorder: Recorder, *, alone: bool
    ) -> Tensor:
        """Run the prompt of each group; returns the logits [P, W] of the tokens that follow them."""
        weights, requests = self._loaded_weights(), [as_one(group) for group in groups]
        row = prefill_row(self._vlm, weights, requests, recorder.features(requests, alone=alone))
        hidden_PE = prefill(row, weights, self._shape, requests, cache, recorder, self._tuning.pass_tokens)
        for request in requests:
            self._prefill_work.add(request)
        for request in chain.from_iterable(groups):
            request.kept = None
        return weights.logits(hidden_PE)

    def _make_room(self, batch: DecodeBatch, cache: Cache, steps: int) -> None:
        """Preempt the youngest rows until the others have room for these steps."""
        while not cache.reserve(batch.tokens_after(steps)):
            age = {request: place for place, request in enumerate(self._running)}
            youngest = max(range(len(batch)), key=lambda row: (age[batch.rows[row].request], batch.rows[row].index))
            cache.remove([youngest])
            self._queue.extendleft(map(resumption, batch.remove([youngest])))
            self._full = True

    @torch.no_grad()
    def _decode(self, batch: DecodeBatch, cache: Cache) -> None:
        """Run the decode steps until the next sync, then remove finished rows."""
        if not batch.rows:
            return
        # a finished row runs until the sync: that changes no keys that are read, but it would advance its states
        steps = 1 if cache.states is not None else self._tuning.decode_steps_on(self._device)
        self._make_room(batch, cache, steps)
        stepper = self._ready_stepper(len(batch), cache)
        for _ in range(steps):
            with self._recorder.recording(len(batch)) as first_place:
                batch.step(stepper, first_place)
        self._retire(batch, cache)

    def _retire(self, batch: DecodeBatch, cache: Cache) -> None:
        """Sync with the host to see which rows have finished, remove them, and answer completed requests."""
        finished = batch.sync_finished()
        if not finished:
            return
        # copied before compaction overwrites the rows
        kept_rows = self._copy_kept(batch, cache, finished)
        cache.remove(finished)
        for result in batch.remove(finished):
            request = result.row.request
            self._keep(result, kept_rows.get(id(result.row)))
            completions = self._running[request]
            completions[result.row.index] = self._completion(result)
            if None not in completions:
                del self._running[request]
                if not request.done.done():
                    request.done.set_result([completion for completion in completions if completion is not None])
        self._full = False

    def _copy_kept(self, batch: DecodeBatch, cache: Cache, finished: Sequence[int]) -> dict[int, KeptKeys]:
        """KV cache of finished rows that another turn may continue, by the id of the row object."""
        kept = [index for index in finished if batch.rows[index].request.request.keep]
        stored = batch.num_stored(kept) if kept else []
        copies: dict[int, KeptKeys] = {}
        room = self._memory.kept_tokens
        state_tokens = self._shape.state_tokens(self._loaded_weights().embed.element_size())
        for index, tokens in zip(kept, stored, strict=True):
            prompt = batch.rows[index].request.request.prompt
            room -= prompt.num_tokens + tokens + state_tokens
            if room < 0:  # the next turn of the others is prefilled from its beginning
                break
            copies[id(batch.rows[index])] = KeptKeys(
                layers=cache.copy_row(index, tokens),
                num_tokens=prompt.num_tokens + tokens,
                cost_tokens=prompt.num_tokens + tokens + state_tokens,
                num_images=len(prompt.images),
                states=() if cache.states is None else cache.states.copy_row(index),
            )
        return copies

    def _keep(self, finished: RemovedRow, kept: KeptKeys | None) -> None:
        """Keep the KV cache of a row for the next turn; the least recently used are evicted beyond the token budget."""
        if kept is not None:
            self._kept.put(finished.completion_id, kept, kept.cost_tokens)

    def _completion(self, finished: RemovedRow) -> Completion:
        completion = completion_of(finished, self._text, self._version)
        self._recorder.record_trace(completion.id, finished)
        return completion

    def _loaded_weights(self) -> TextWeights:
        if self._weights is None:
            raise EngineError("the engine has no weights; call load_weights first")
        return self._weights

    def _ready_cache(self) -> Cache:
        if self._cache is None:
            like = self._loaded_weights().embed
            self._memory.size(self._shape.token_bytes(like.element_size()))
            self._cache = make_cache(self._tuning, self._shape, like, num_tokens=self._memory.tokens)
            self._forget_turns()
        return self._cache

    def _ready_stepper(self, rows: int, cache: Cache) -> Forward:
        """The stepper with the fastest linear layers for so many rows; those in 8 bits where all requests accept it."""
        # one decode step serves all rows: a single exact request makes all of them exact
        if self._tuning.int8_decoding and self._may_approximate:
            return self._on_copies(Int8Linears, cache)
        # by the number of rows only, so that a resumed run decodes with the same kernel
        if self._tuning.uses_onednn(rows, self._loaded_weights().embed):
            return self._on_copies(OneDnnLinears, cache)
        if self._stepper is None:
            self._stepper = make_stepper(self._vlm, self._loaded_weights(), self._shape, cache)
        return self._stepper

    def _on_copies(self, linears: Make, cache: Cache) -> Forward:
        """The stepper on decode copies of this kind, made once for the present weights."""
        if linears not in self._copies:
            weights = text_weights(self._named, self._shape, self._tape, linears)
            self._copies[linears] = make_stepper(self._vlm, weights, self._shape, cache)
        return self._copies[linears]

    def _free_decode_copies(self) -> None:
        """Free the decode copies (oneDNN and 8-bit weights), whose memory the update needs."""
        self._copies = {}
