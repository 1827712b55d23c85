"""Check of a model without a family in Fovea: rows of the run against transformers' processor and forward.

Prompts must have the ids and tensors of the processor, the trainer's log-probs must equal those of transformers'
forward on the processor's outputs, and another picture must change them. A failed check ends the run before its first
step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import ImageOps
from torch import Tensor
from torch.nn.functional import pad

from fovea.errors import ModelError, is_out_of_memory
from fovea.models.families.hub_processor import PER_TOKEN, HubProcessor
from fovea.models.policy_network import PolicyNetwork
from fovea.models.processor import Processor
from fovea.models.render import Renderer, images_of
from fovea.models.sampling_distribution import sampling_logprobs_
from fovea.train.packing import pack_row
from fovea.types import Prompt
from fovea_gym.errors import FoveaError, first_line
from fovea_gym.rows.images import OpenImage
from fovea_gym.types import ImageRef, Message

ANSWER = "The answer is \\boxed{3}."
MAX_RMS = {torch.float32: 1e-4, torch.bfloat16: 0.3}
"""Largest root mean square of log-prob differences that rounding can cause, by dtype of the weights."""

Row = Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """transformers' own classes for the same model."""

    network: Any
    processor: HubProcessor
    arguments: frozenset[str]
    """Names of the arguments of the network's forward."""


class StartCheck:
    """Compares the rendering and scoring of rows with transformers."""

    def __init__(
        self, vlm: PolicyNetwork, processor: Processor, renderer: Renderer, open_image: OpenImage, reference: Reference
    ) -> None:
        self._vlm, self._family, self._reference = vlm, vlm.family, reference
        self._processor, self._renderer, self._open_image = processor, renderer, open_image
        self._answer_T = torch.tensor(renderer.target(ANSWER), device=vlm.device)

    def run(self, rows: Sequence[Row]) -> float:
        """Check rows and return their largest log-prob difference; ModelError with the reason if a row fails."""
        try:
            return self._compare(rows)
        except Exception as error:  # forward code from the Hub, and its kernels, may raise anything
            if isinstance(error, FoveaError) or is_out_of_memory(error):
                raise
            raise self._refusal(f"transformers' forward fails on rows of this run ({first_line(error)})") from error

    def logprobs(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Log-probs [rows, T] of an answer by the trainer and by transformers; ModelError if their inputs differ."""
        made = [self._made(row) for row in rows]
        prompts = [self._renderer.prompt(row) for row in rows]
        for row, prompt, expected in zip(rows, prompts, made, strict=True):
            if difference := self._different_inputs(prompt, expected):
                raise self._refusal(f"a prompt with {len(images_of(row))} images has {difference}")
        return self._scored(prompts), torch.stack([self._expected(each) for each in made])

    @torch.no_grad()
    def _compare(self, rows: Sequence[Row]) -> float:
        ours, theirs = self.logprobs(rows)
        difference_RT = ours - theirs
        rms = float(difference_RT.square().mean(1).max().sqrt())
        # `not <=` and not `>`: a NaN is a difference
        if not rms <= MAX_RMS[self._vlm.dtype]:
            raise self._refusal(f"log-probs differ from those of transformers' forward by {rms:.2g} (root mean square)")
        largest = float(difference_RT.abs().max())
        # another picture must change the log-probs of every row with one
        seeing = [index for index, row in enumerate(rows) if images_of(row)]
        swapped = self._scored([self._renderer.prompt([self._negative(each) for each in rows[i]]) for i in seeing])
        for index, others_T in zip(seeing, swapped, strict=True):
            if not float((others_T - ours[index]).abs().max()) > 4 * largest:
                raise self._refusal(
                    "another picture does not change the log-probs: the vision tower is not loaded, or not used"
                )
        return largest

    def _made(self, row: Row) -> Mapping[str, Any]:
        pictures = [self._open_image(ref) for ref in images_of(row)]
        return self._reference.processor.inputs(self._renderer.text(row), pictures)

    def _different_inputs(self, prompt: Prompt, expected: Mapping[str, Any]) -> str | None:
        """Describe how a prompt differs from the processor's outputs; None if it does not."""
        if not np.array_equal(prompt.token_ids_L, expected["input_ids"][0]):
            return f"{prompt.num_tokens} token ids that differ from the processor's {expected['input_ids'].size}"
        inputs = self._family.forward_inputs(torch.from_numpy(prompt.token_ids_L)[None], prompt.images)
        wanted = self._reference.arguments.intersection(expected) - {"input_ids", "attention_mask"}
        # an input of zeros marks nothing and may be left out
        if missing := [name for name in wanted - inputs.keys() if np.any(expected[name])]:
            return f"no {min(missing)}, which the processor returns"
        for name in sorted(wanted & inputs.keys()):
            if not np.array_equal(inputs[name].numpy(), expected[name]):
                return f"a different {name} than the processor's"
        return None

    def _scored(self, prompts: Sequence[Prompt]) -> Tensor:
        """The trainer's log-probs [rows, T] of the answer, with all prompts in one micro-batch."""
        if not prompts:
            return torch.zeros(0, len(self._answer_T))
        answers = [[self._answer_T.cpu().numpy()]] * len(prompts)
        row = pack_row(self._family, prompts, answers, self._vlm.device)
        scores = self._vlm(row, temperature=1.0, chunk_tokens=row.num_actions)
        found: Tensor = scores.logprobs_A.cpu()
        return found.view(len(prompts), -1)

    def _expected(self, made: Mapping[str, Any]) -> Tensor:
        """Log-probs [T] of the answer by transformers' forward on the processor's outputs."""
        given = {name: torch.as_tensor(x).to(self._vlm.device) for name, x in made.items()}
        given = {name: x.to(self._vlm.dtype) if x.is_floating_point() else x for name, x in given.items()}
        given["input_ids"] = torch.cat([given["input_ids"], self._answer_T[None]], dim=1)
        for name in given.keys() & {"attention_mask", *PER_TOKEN}:
            given[name] = pad(given[name], (0, len(self._answer_T)), value=int(name == "attention_mask"))
        logits_TW = self._reference.network(**given, use_cache=False).logits[0, -len(self._answer_T) - 1 : -1]
        logprobs_TW = sampling_logprobs_(logits_TW.float(), 1.0, self._vlm.banned_K)
        return logprobs_TW.gather(1, self._answer_T[:, None])[:, 0].cpu()

    def _negative(self, message: Message) -> Message:
        """The message with inverted pictures."""
        parts = [
            ImageRef(source=np.asarray(ImageOps.invert(self._open_image(part)))) if isinstance(part, ImageRef) else part
            for part in message.parts
        ]
        return replace(message, parts=tuple(parts))

    def _refusal(self, reason: str) -> ModelError:
        return ModelError(
            f"{self._processor.name}, a {self._family.model_type}, cannot be trained as transformers runs it: "
            f"{reason}; set model.path to another model, or add a family for this one (docs/extending.md)"
        )
