"""The plain engine: transformers' own forward and KV cache, one request at a time; a slow reference implementation.

It uses the same random numbers as the embedded engine, so that both sample the same completions up to rounding.

Axes: `B` completions of a request, `L` tokens of its prompt, `W` vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fovea.config.backends import DEFAULT_BATCH_TOKENS
from fovea.errors import EngineError
from fovea.models.plain import plain_inputs
from fovea.models.policy_network import PolicyNetwork
from fovea.models.processor import Processor
from fovea.models.trainable import factored_weights
from fovea.rollout.base import memory_for_rollout
from fovea.rollout.embedded.batch import DecodeBatch, DecodeStep, completion_of
from fovea.rollout.embedded.prefill import PrefillWork
from fovea.rollout.embedded.requests import QueuedRequest
from fovea.rollout.embedded.sampler import sample_tokens
from fovea.rollout.outputs import CompletionText
from fovea.types import Completion, Metrics, Prompt, Request, Weights


class PlainEngine:
    """Samples completions with the policy's network in this process, for any model family."""

    def __init__(self, vlm: PolicyNetwork, processor: Processor, *, max_batch_tokens: int | None) -> None:
        self._network: Any = vlm.network
        self._family, self._dtype = vlm.family, vlm.dtype
        self._max_batch_tokens = max_batch_tokens or DEFAULT_BATCH_TOKENS
        self._text = CompletionText(processor.tokenizer, processor.stop_ids)
        self._device = vlm.device
        self._stop_ids = torch.tensor(processor.stop_ids, dtype=torch.long, device=self._device)
        self._banned_K = vlm.banned_K
        self._prefill_work = PrefillWork(vlm.family.work)
        self._version: int | None = None
        self._asleep = False

    async def generate(self, request: Request) -> Sequence[Completion]:
        """Sample n completions of one prompt; EngineError if they exceed the token budget, or while asleep."""
        if self._version is None:
            raise EngineError("the engine has no weights; call load_weights first")
        if self._asleep:
            raise EngineError("a request reached an engine that is asleep; call wake first")
        needed = request.n * (request.prompt.num_tokens + request.sampling.max_new_tokens)
        if needed > self._max_batch_tokens:
            raise EngineError(
                f"{request.n} copies of a prompt of {request.prompt.num_tokens} tokens with completions of up to "
                f"{request.sampling.max_new_tokens} need {needed} cache tokens, but rollout.engine.max_batch_tokens="
                f"{self._max_batch_tokens}; raise it, or lower rollout.samples_per_prompt or rollout.max_new_tokens"
            )
        positions_XL, first_position = self._family.positions(request.prompt.token_ids_L, request.prompt.images, 0)
        done = asyncio.get_running_loop().create_future()
        with memory_for_rollout(self._max_batch_tokens):
            return self._draw(
                QueuedRequest(request=request, done=done, positions_3L=positions_XL, first_position=first_position)
            )

    @torch.no_grad()
    def _draw(self, queued: QueuedRequest) -> list[Completion]:
        """Prefill once, copy the KV cache for every completion, and decode until the last row has finished."""
        logits_1W, cache = self._prefill(queued.prompt, queued.n)
        self._prefill_work.add(queued)

        def forward(step: DecodeStep) -> tuple[Tensor, Tensor]:
            following = self._network(input_ids=step.token_B[:, None], past_key_values=cache, use_cache=True)
            return sample_tokens(following.logits[:, -1].float(), step.draw)

        batch = DecodeBatch(self._device, self._stop_ids, self._banned_K, self._text)
        batch.add([[queued]], logits_1W)
        # no compaction: rows are removed only when all of them have finished
        while len(finished := batch.wait_for_finished()) < len(batch):
            batch.step(forward)
        assert self._version is not None
        return [completion_of(each, self._text, self._version) for each in batch.remove(finished)]

    def _prefill(self, prompt: Prompt, n: int) -> tuple[Tensor, Any]:
        """Run the prompt; returns the logits [1, W] of the next token, and a cache with n copies of the prompt."""
        for module in self._network.modules():
            if getattr(module, "rope_deltas", None) is not None:
                # left from the previous prompt; a prompt without images would not replace it
                module.rope_deltas = None
        ids_1L = torch.from_numpy(prompt.token_ids_L)[None].to(self._device)
        inputs = plain_inputs(self._family, ids_1L, prompt.images, self._dtype)
        out = self._network(input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L), use_cache=True, **inputs)
        cache = out.past_key_values
        # not `batch_repeat_interleave`, which caches of recurrent states lack
        cache.reorder_cache(ids_1L.new_zeros(n))
        return out.logits[:, -1].float(), cache

    def prefill_metrics(self) -> Metrics:
        """Return the metrics of the prefill since the last call."""
        return self._prefill_work.take()

    @property
    def name(self) -> str:
        return "plain"

    def own_weights(self) -> Weights:
        """Return the tensors of the network, named by `models.trainable.factored_weights`."""
        return ((name, weight.detach()) for name, weight in factored_weights(self._network))

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy the weights that are not shared with the policy."""
        own = dict(self._network.named_parameters())
        for name, tensor in weights.items():
            # a name that is missing here belongs to an adapted layer, whose adapter the policy's network applies
            if name in own and own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
        self._version = version

    async def sleep(self) -> None:
        """Refuse requests until `wake`; between requests there is no memory to free."""
        self._asleep = True

    async def wake(self) -> None:
        """Accept requests again."""
        self._asleep = False

    async def close(self) -> None:
        """Drop the version of the weights; the network belongs to the policy and stays."""
        self._version = None
