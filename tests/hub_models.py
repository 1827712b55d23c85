"""Tiny models whose prompts transformers' processor makes, beside that processor's inputs and transformers' scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoImageProcessor, SuppressTokensLogitsProcessor

from fovea.config.model import Model
from fovea.models.families.hub_processor import PER_TOKEN
from fovea.models.families.registry import known
from fovea.models.load import load_network
from fovea.models.policy_network import PolicyNetwork
from fovea.models.processor import load_processor
from fovea.models.render import Renderer, images_of
from fovea.models.tiny import TinyParts
from fovea.train.packing import pack_row
from fovea.train.start_check import Reference, StartCheck
from fovea.types import Completion, Prompt
from fovea_gym.types import Message
from gym_tests.images import from_array
from tests.reference import largest_relative_difference
from tests.tiny_models import CPU, image, user

needs_image_processors = pytest.mark.skipif(
    hasattr(AutoImageProcessor, "_backends"), reason="AutoImageProcessor of this transformers asks for torchvision"
)
CHATS = [
    user("How many circles are there?"),
    user(image(1), "How many circles are there?"),
    user("Compare \n\n", image(2, 70, 40), " with ", image(3, 33, 90), image(4, 48, 48), "\nnow."),
]
TOLERANCE = 2e-5


class Loaded(TinyParts):
    """A tiny model with its prompts, the inputs that transformers' processor makes, and transformers' scores."""

    @classmethod
    def of(cls, folder: Path) -> Loaded:
        model_type = json.loads((folder / "config.json").read_text())["model_type"]
        settings = Model(path=str(folder), family="named" if model_type in known() else "auto")
        return cls(network=load_network(settings), processor=load_processor(settings))

    @property
    def renderer(self) -> Renderer:
        return Renderer(self.processor, from_array)

    @property
    def prompts(self) -> list[Prompt]:
        return [self.renderer.prompt(chat) for chat in CHATS]

    def inputs(self, chat: list[Message]) -> dict[str, Any]:
        pictures = [from_array(ref) for ref in images_of(chat)]
        return dict(self.processor.image_processor.inputs(self.renderer.text(chat), pictures))

    def scores(self, chat: list[Message], completion: np.ndarray, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies [T] and last states [T, width] by transformers' forward on its processor's outputs."""
        given = {name: torch.as_tensor(x) for name, x in self.inputs(chat).items()}
        ids = torch.cat([given["input_ids"], torch.from_numpy(completion)[None]], dim=1)
        for name in given.keys() & {"attention_mask", *PER_TOKEN}:
            given[name] = pad(given[name], (0, len(completion)), value=int(name == "attention_mask"))
        out = self.network(**given | {"input_ids": ids}, use_cache=False, output_hidden_states=True)
        place = slice(-len(completion) - 1, -1)
        suppress = SuppressTokensLogitsProcessor(self.processor.banned_ids)
        logprobs = suppress(ids, out.logits[0, place] / temperature).log_softmax(-1)  # type: ignore[arg-type]
        entropy = torch.distributions.Categorical(logits=logprobs[:, ~logprobs[0].isinf()]).entropy()
        picked = logprobs.gather(1, torch.from_numpy(completion)[:, None])[:, 0]
        return picked, entropy, out.hidden_states[-1][0, place]

    def check(self, vlm: PolicyNetwork) -> float:
        processor = self.processor.image_processor
        reference = Reference(network=self.network, processor=processor, arguments=vlm.family.layout.arguments)
        return StartCheck(vlm, self.processor, self.renderer, from_array, reference).run(CHATS)


def assert_inputs_equal(loaded: Loaded) -> None:
    """Prompts have the ids and tensors of transformers' processor."""
    family = loaded.processor.family
    for chat, prompt in zip(CHATS, loaded.prompts, strict=True):
        expected = loaded.inputs(chat)
        assert prompt.token_ids_L.tolist() == expected["input_ids"][0].tolist()
        inputs = family.forward_inputs(torch.from_numpy(prompt.token_ids_L)[None], prompt.images)
        assert inputs.keys() >= expected.keys() & family.layout.arguments - {"input_ids", "attention_mask"}
        for name, tensor in inputs.items():
            np.testing.assert_array_equal(tensor.numpy(), expected.get(name, tensor.numpy()), err_msg=name)


def assert_scored(vlm: PolicyNetwork, prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]) -> None:
    """The trainer gives the completions of the prompts the engine's log-probs at temperature 1."""
    row = pack_row(vlm.family, prompts, [[each.token_ids_T for each in group] for group in groups], CPU)
    with torch.no_grad():
        scored = vlm(row, temperature=1.0, chunk_tokens=100).logprobs_A
    engines = np.concatenate([each.logprobs_T for group in groups for each in group])
    np.testing.assert_allclose(scored.numpy(), engines, atol=1e-5)


def moving_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Largest relative difference of gradients that are more than rounding: a key's bias moves no softmax."""
    total = torch.stack([x.norm() for x in second.values()]).norm()
    moving = {name for name, x in second.items() if x.norm() > 1e-6 * total}
    return largest_relative_difference(*({name: each[name] for name in moving} for each in (first, second)))
