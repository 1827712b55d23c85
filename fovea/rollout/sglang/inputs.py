"""Conversion of requests to SGLang's inputs: expanded token ids, processed pixels and sampling parameters.

SGLang does not process images here. It receives the same tensors as the trainer ("processor_output"), and token ids
that already contain the visual tokens of every image, so that neither pixels nor ids can differ from the trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fovea.errors import EngineError
from fovea.rollout.outputs import stacked, stop_strings
from fovea.types import Prompt, Request, Sampling

SampleInputs = Mapping[str, Any]
"""Request for one completion, as the fields of SGLang's `GenerateReqInput`."""
SEEDS = 1 << 63
"""Exclusive limit of seeds, which SGLang stores in signed 64 bits."""
LOWEST_TOP_P = 1e-6
"""Top-p that leaves only the likeliest token; it replaces lower values, which mean the same."""
BAN = -1e9
"""Bias that SGLang adds to the logit of a banned id: finite, but low enough for probability 0 in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangTranslator:
    """Converts Fovea's requests to SGLang's, for one model."""

    stop_ids: tuple[int, ...]
    banned_ids: tuple[int, ...]
    min_new_tokens: int = 0

    def sample_inputs(self, request: Request) -> list[SampleInputs]:
        """Build the inputs of each completion, of one if greedy; EngineError for parameters that rule out seeds."""
        prompt = _prompt(request.prompt)
        return [
            prompt | {"rid": f"{request.id}/{number}", "sampling_params": self._sampling(request.sampling, number)}
            for number in range(request.n if request.sampling.temperature else 1)
        ]

    def _sampling(self, sampling: Sampling, number: int) -> dict[str, Any]:
        if sampling.min_p:
            raise EngineError(
                f"min_p={sampling.min_p:g} was requested, with which SGLang cannot sample by a seed; set "
                "rollout.min_p=0, or rollout.engine=embedded"
            )
        return {
            "temperature": sampling.temperature,
            # a top-p that is 0 in float32 would leave no token
            "top_p": max(sampling.top_p, LOWEST_TOP_P),
            "top_k": sampling.top_k or -1,
            "sampling_seed": (sampling.seed + number) % SEEDS,
            "max_new_tokens": sampling.max_new_tokens,
            "min_new_tokens": self.min_new_tokens,
            "stop": stop_strings(sampling),
            "stop_token_ids": list(self.stop_ids),
            "logit_bias": {str(banned): BAN for banned in self.banned_ids},
            # keep the tokens of a stop string: they were sampled, so they are trained on
            "no_stop_trim": True,
        }


def _prompt(prompt: Prompt) -> dict[str, Any]:
    """Fields of `GenerateReqInput` that all completions of a prompt share."""
    fields: dict[str, Any] = {
        "input_ids": prompt.token_ids_L.tolist(),
        "return_logprob": True,
        "return_prompt_token_ids": True,
    }
    if prompt.images:
        fields["image_data"] = [{"format": "processor_output", **stacked(prompt.images)}]
    return fields
