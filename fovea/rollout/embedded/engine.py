"""The embedded engine: one vision encode and one prefill per prompt, shared by its n completions.

Requests queue up; groups are admitted while their keys fit the token budget, decode in step, and leave when their
last completion ends, so that others move up. What a completion holds depends on its request alone: its random
numbers come from the request's seed, and attention never looks into another row.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fovea.errors import EngineError
from fovea.models.decoder import decode, decoder_shape
from fovea.models.image_features import ImageFeatures
from fovea.models.parts import ModelParts, banned_token_ids, stop_token_ids
from fovea.models.tape import Tape, Trace
from fovea.models.vlm import VLM
from fovea.rollout.embedded.cache import CacheAttention
from fovea.rollout.embedded.groups import Groups, Request, new_groups
from fovea.rollout.embedded.prefill import prefill
from fovea.rollout.embedded.sampler import draw
from fovea.rollout.embedded.text import CompletionText
from fovea.rollout.embedded.weights import TextWeights, text_weights
from fovea.types import Completion, Prompt, Sampling, Weights


class EmbeddedEngine:
    """Draws completions with the trainer's own tensors, in its process."""

    def __init__(self, vlm: VLM, parts: ModelParts, *, max_batch_tokens: int, tape: Tape | None = None) -> None:
        self._vlm = vlm
        self._tape = tape
        self._graphs: dict[int, dict[str, ImageFeatures]] = {}
        self._max_batch_tokens = max_batch_tokens
        self._shape = decoder_shape(vlm.text_config)
        self._text = CompletionText(parts.tokenizer, stop_token_ids(parts))
        self._device = next(vlm.parameters()).device
        self._stop_ids = torch.tensor(stop_token_ids(parts), device=self._device)
        self._banned_ids = torch.tensor(banned_token_ids(parts), dtype=torch.long, device=self._device)
        self._weights: TextWeights | None = None
        self._version = 0
        self._queue: deque[Request] = deque()
        self._open: list[Request] = []
        """Asked and not answered: queued or running."""
        self._worker: asyncio.Task[None] | None = None

    async def generate(self, prompt: Prompt, sampling: Sampling, n: int) -> Sequence[Completion]:
        """n completions of one prompt; EngineError when they cannot fit the token budget."""
        request = Request(prompt=prompt, sampling=sampling, n=n, done=asyncio.get_running_loop().create_future())
        if request.cache_tokens > self._max_batch_tokens:
            raise EngineError(
                f"a prompt of {prompt.num_tokens} tokens with {n} completions of up to {sampling.max_new_tokens} needs "
                f"{request.cache_tokens} cache tokens, and rollout.max_batch_tokens={self._max_batch_tokens}; raise "
                "that, or lower rollout.samples_per_prompt or rollout.max_new_tokens"
            )
        self._queue.append(request)
        self._open.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._run())
        return await request.done

    def load_weights(self, weights: Weights, version: int) -> None:
        """Take references to the language model's tensors; copy the vision tower's unless they are shared."""
        if self._worker is not None and not self._worker.done():
            raise EngineError("new weights while completions are being drawn; await them first")
        named = dict(weights)
        own = dict(self._vlm.network.named_parameters())
        with torch.no_grad():
            for name, tensor in named.items():
                if ".visual." in name and own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor)
        self._weights = text_weights(named, self._shape, self._tape)
        self._version = version
        if self._tape is not None:
            self._tape.restart()

    def sleep(self) -> None:
        """Nothing to give back: between calls of `generate` the engine holds no cache."""

    def wake(self) -> None:
        """Nothing to take."""

    def close(self) -> None:
        self._weights = None

    async def _run(self) -> None:
        """Serve the queue until it is empty; a failure reaches every caller."""
        groups: Groups | None = None
        try:
            while self._queue or groups is not None:
                await asyncio.sleep(0)  # lets callers queue up, so that their prompts are prefilled together
                groups = self._admit(groups)
                self._step(groups)
                groups = self._retire(groups)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _fail(self, error: BaseException) -> None:
        """Pass an error to every caller that waits."""
        for request in self._open:
            if not request.done.done():
                request.done.set_exception(error)
        self._queue.clear()
        self._open.clear()

    @torch.no_grad()
    def _admit(self, groups: Groups | None) -> Groups:
        """Prefill as many queued requests as fit beside the running groups."""
        admitted: list[Request] = []
        running = list(groups.requests) if groups is not None else []
        while self._queue and self._fits([*running, *admitted, self._queue[0]]):
            admitted.append(self._queue.popleft())
        if not admitted:
            assert groups is not None, "a request that fits the budget alone was not admitted to an idle engine"
            return groups
        new = self._prefill(admitted)
        return new if groups is None else groups.join(new)

    def _fits(self, requests: Sequence[Request]) -> bool:
        """Whether the padded cache stays within the budget; groups of different size never run together."""
        prompt = max(request.prompt.num_tokens for request in requests)
        room = max(request.sampling.max_new_tokens for request in requests)
        n = requests[0].n
        same_size = all(request.n == n for request in requests)
        return same_size and len(requests) * (prompt + n * room) <= self._max_batch_tokens

    def _prefill(self, requests: Sequence[Request]) -> Groups:
        """Run each prompt once, and draw the first token of all its completions."""
        weights = self._loaded_weights()
        traced = self._tape is not None and all(r.sampling.trace for r in requests)
        traced = traced and self._tape.reserve(sum(r.cache_tokens for r in requests))
        self._recording = traced
        graph = {}
        if traced and any(p.requires_grad for p in self._vlm.network.get_submodule("model.visual").parameters()):
            images = {image.key: image for r in requests for image in r.prompt.images}
            with torch.enable_grad():
                graph = dict(zip(images, self._vlm.encode(list(images.values()))))
        lengths = [r.prompt.num_tokens for r in requests]
        if traced:
            with self._tape.recording(sum(lengths)) as start:
                last_hidden_PE, cache = prefill(self._vlm, weights, self._shape, requests, graph)
        else:
            last_hidden_PE, cache = prefill(self._vlm, weights, self._shape, requests)
        groups = new_groups(requests, cache, self._device)
        for r in requests:
            self._graphs[id(r)] = graph
        if traced:
            groups.first_place_P.copy_(torch.tensor(lengths).cumsum(0) - torch.tensor(lengths) + start)
        self._draw(groups, weights.logits(last_hidden_PE).repeat_interleave(groups.size, 0))
        return groups

    @torch.no_grad()
    def _step(self, groups: Groups) -> None:
        """One more token for every completion that still runs."""
        if not bool(groups.running_PG.any()):
            return
        weights = self._loaded_weights()
        index_P = groups.index_P
        tokens_PG = groups.tokens_PGT[groups.rows_P, :, index_P]
        position_B = (groups.next_position_P + index_P).repeat_interleave(groups.size)
        hidden_BE = weights.embed[tokens_PG.flatten()]
        rope = self._vlm.rope(position_B.expand(3, -1), hidden_BE)
        attend = CacheAttention(groups.cache, self._shape.scale)
        if self._recording:
            with self._tape.recording(len(hidden_BE)) as start:
                out = decode(weights.decoder, self._shape, hidden_BE, rope, attend)
            groups.places_PGT[groups.rows_P, :, index_P] = (start + torch.arange(len(hidden_BE))).view(
                groups.running_PG.shape
            )
        else:
            out = decode(weights.decoder, self._shape, hidden_BE, rope, attend)
        self._draw(groups, weights.logits(out))

    def _draw(self, groups: Groups, logits_BW: Tensor) -> None:
        """Draw and record the next token of every completion; note which ended."""
        index_P = groups.index_P
        uniform_B = groups.uniforms_PGT[groups.rows_P, :, index_P].flatten()
        tokens_B, logprobs_B = draw(logits_BW, uniform_B, groups.settings, self._banned_ids)
        drawn_PG = groups.running_PG.clone()
        groups.record(index_P, tokens_B, logprobs_B, self._stop_ids)
        for row, request in enumerate(groups.requests):
            if request.sampling.stop:
                self._stop_at_strings(groups, row, drawn_PG[row].nonzero()[:, 0].tolist())

    def _stop_at_strings(self, groups: Groups, row: int, columns: Sequence[int]) -> None:
        """End the completions whose newest token completes a stop string, be it the last that the limit allows."""
        stop = groups.requests[row].sampling.stop
        for column in columns:
            tokens = groups.tokens_PGT[row, column, : groups.lengths_PG[row, column]].tolist()
            if self._text.holds_stop(tokens, stop):
                groups.running_PG[row, column] = False
                groups.stopped_PG[row, column] = True

    def _retire(self, groups: Groups) -> Groups | None:
        """Answer the groups that have ended; drop them once a quarter of the batch has, since dropping copies."""
        ended = (~groups.running_PG.any(dim=1)).tolist()
        for row, request in enumerate(groups.requests):
            if ended[row] and not request.done.done():
                request.done.set_result(self._completions(groups, row))
                self._open.remove(request)
        if all(ended):
            return None
        if 4 * sum(ended) < len(ended):
            return groups
        return groups.select([row for row, over in enumerate(ended) if not over])

    def _completions(self, groups: Groups, row: int) -> list[Completion]:
        stop = groups.requests[row].sampling.stop
        lengths = groups.lengths_PG[row].tolist()
        stopped = groups.stopped_PG[row].tolist()
        tokens, logprobs = groups.tokens_PGT[row].cpu().numpy(), groups.logprobs_PGT[row].cpu().numpy()
        first = int(groups.first_place_P[row])
        places = groups.places_PGT[row].numpy()
        prompt = first + np.arange(groups.requests[row].prompt.num_tokens)
        return [
            Completion(
                trace=None
                if first < 0
                else Trace(
                    tape=self._tape,
                    rollout=self._tape.rollout,
                    prompt_places_L=prompt,
                    places_T=places[column, : length - 1].copy(),
                    features=self._graphs[id(groups.requests[row])],
                ),
                token_ids_T=tokens[column, :length].copy(),
                logprobs_T=logprobs[column, :length].copy(),
                text=self._text.decode(tokens[column, :length].tolist(), stop),
                finish="stop" if stopped[column] else "length",
                version=self._version,
            )
            for column, length in enumerate(lengths)
        ]

    def _loaded_weights(self) -> TextWeights:
        if self._weights is None:
            raise EngineError("the engine has no weights; call load_weights first")
        return self._weights
