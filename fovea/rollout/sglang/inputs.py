"""Requests as SGLang takes them: expanded token ids, processed pixels, and sampling parameters.

SGLang processes no image here. It gets the tensors that the trainer gets ("processor_output"), and the token ids in
which every image has its visual tokens already, so that neither pixels nor ids can differ from the trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fovea.errors import EngineError
from fovea.rollout.outputs import stacked, stop_strings
from fovea.types import Prompt, Request, Sampling

SampleInputs = Mapping[str, Any]
"""One completion to draw, as the fields of SGLang's `GenerateReqInput`."""
SEEDS = 1 << 63
"""Seeds below this, which SGLang keeps in signed 64 bits."""
LOWEST_TOP_P = 1e-6
"""Leaves the likeliest token only, as any lower one means to."""
BAN = -1e9
"""The bias of a banned id: probability 0 in float32, and finite, since SGLang adds it to zeros elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangTranslator:
    """Turns Fovea's requests into SGLang's, for one model."""

    stop_ids: tuple[int, ...]
    banned_ids: tuple[int, ...]
    min_new_tokens: int = 0

    def sample_inputs(self, request: Request) -> list[SampleInputs]:
        """One for each completion; greedy completions are all the same, and sampled once.

        EngineError for parameters that SGLang does not have together with seeds.
        """
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
            # 0 in float32 would leave no token
            "top_p": max(sampling.top_p, LOWEST_TOP_P),
            "top_k": sampling.top_k or -1,
            "sampling_seed": (sampling.seed + number) % SEEDS,
            "max_new_tokens": sampling.max_new_tokens,
            "min_new_tokens": self.min_new_tokens,
            "stop": stop_strings(sampling),
            "stop_token_ids": list(self.stop_ids),
            "logit_bias": {str(banned): BAN for banned in self.banned_ids},
            # the tokens of a stop string were sampled, and are trained
            "no_stop_trim": True,
        }


def _prompt(prompt: Prompt) -> dict[str, Any]:
    """The fields of `GenerateReqInput` that all completions of a prompt have in common."""
    fields: dict[str, Any] = {
        "input_ids": prompt.token_ids_L.tolist(),
        "return_logprob": True,
        "return_prompt_token_ids": True,
    }
    if prompt.images:
        fields["image_data"] = [{"format": "processor_output", **stacked(prompt.images)}]
    return fields
