"""Conversion of requests to vLLM's inputs: expanded token ids, processed pixels and sampling parameters.

vLLM does not process images here. It receives the same tensors as the trainer, and token ids that already contain the
visual tokens of every image, so that neither pixels nor ids can differ from the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature
from vllm import SamplingParams
from vllm.inputs.engine import mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.sampling_params import RequestOutputKind

from fovea.errors import EngineError
from fovea.rollout.outputs import stacked, stop_strings
from fovea.types import Prompt, Request

SEEDS = 1 << 62
"""Exclusive limit of seeds: vLLM adds the completion's index to the request's seed, in signed 64 bits."""

Fields = Callable[[BatchFeature], Mapping[str, Any]]
"""Function of vLLM's model class that describes how processed tensors are split into images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmTranslator:
    """Converts Fovea's requests to vLLM's, for one model."""

    fields: Fields
    image_token_id: int
    stop_ids: tuple[int, ...]
    banned_ids: tuple[int, ...]
    min_new_tokens: int = 0

    def prompt(self, prompt: Prompt) -> Any:
        """Convert a prompt to the input of `LLMEngine.add_request`."""
        ids = prompt.token_ids_L.tolist()
        if not prompt.images:
            return tokens_input(ids)
        tensors = BatchFeature(stacked(prompt.images))
        return mm_input(
            ids,
            MultiModalKwargsItems.from_hf_inputs(tensors, self.fields(tensors)),
            {"image": [image.key for image in prompt.images]},
            {"image": [PlaceholderRange(offset=start, length=length) for start, length in self._places(prompt)]},
        )

    def sampling(self, request: Request) -> SamplingParams:
        """Sampling parameters with which vLLM's log-probs follow the definition in `rollout.base.Engine`.

        Raises EngineError if the request's parameters rule that out.
        """
        sampling = request.sampling
        if sampling.temperature and (sampling.top_p < 1 or sampling.top_k or sampling.min_p):
            raise EngineError(
                f"top_p={sampling.top_p:g}, top_k={sampling.top_k} and min_p={sampling.min_p:g} were "
                "requested, with which vLLM returns log-probs of the truncated distribution; set rollout.top_p=1, "
                "rollout.top_k=0 and rollout.min_p=0, or rollout.engine=embedded"
            )
        return SamplingParams(
            # vLLM refuses n > 1 for greedy sampling
            n=request.n if sampling.temperature else 1,
            temperature=sampling.temperature,
            seed=sampling.seed % SEEDS,
            max_tokens=sampling.max_new_tokens,
            min_tokens=self.min_new_tokens,
            stop=stop_strings(sampling),
            stop_token_ids=list(self.stop_ids),
            # a bias of -inf gives probability 0; only the web API limits biases to +-100
            logit_bias=dict.fromkeys(self.banned_ids, -torch.inf),
            logprobs=0,
            flat_logprobs=True,
            # vLLM needs text only to find stop strings; `fovea.rollout.outputs` decodes completions
            detokenize=bool(stop_strings(sampling)),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _places(self, prompt: Prompt) -> Sequence[tuple[int, int]]:
        """Start and length of each image's run of visual tokens."""
        is_visual_L = prompt.token_ids_L == self.image_token_id
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_visual_L, [False]]).astype(np.int8)))
        starts, ends = edges[::2].tolist(), edges[1::2].tolist()
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        if lengths != [image.num_tokens for image in prompt.images]:
            raise EngineError(
                f"the prompt has runs of {lengths} visual tokens, but its images have "
                f"{[image.num_tokens for image in prompt.images]}; this is a bug, please report it with the model"
            )
        return list(zip(starts, lengths, strict=True))
