"""Positions of a conversation, stretch by stretch, against transformers' own over the whole of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from fovea.models.tiny import TinyParts
from fovea.types import Message, PromptImage
from tests.tiny_models import image, renderer, user

STRETCHES: dict[str, list[list[Message]]] = {
    "text alone": [user("How many circles?"), user("Look again.")],
    "an image in the first": [user(image(1), "How many?"), user("Look again.")],
    "an image in the second": [user("How many?"), user("Here is a crop: ", image(2, 64, 96), " and now?")],
    "images in all": [
        user(image(1), " and ", image(2, 64, 48), image(3, 33, 90), "Which?"),
        user(image(4, 96, 32)),
        user("Here: ", image(5), image(5), "?"),
    ],
}


def whole_conversation(parts: TinyParts, ids: np.ndarray, images: Sequence[PromptImage]) -> tuple[np.ndarray, int]:
    """transformers' positions [3, L], and that of the next token."""
    ids_1L = torch.from_numpy(ids)[None]
    grids = torch.tensor([each.tensors["image_grid_thw"].tolist() for each in images]) if images else None
    pads = (ids_1L == parts.processor.family.image_token_id).int()
    positions, delta = parts.network.model.get_rope_index(
        ids_1L, mm_token_type_ids=pads, image_grid_thw=grids, attention_mask=torch.ones_like(ids_1L)
    )
    return positions[:, 0].numpy(), len(ids) + int(delta)


@pytest.mark.parametrize("conversation", STRETCHES)
def test_stretches_compose_to_the_positions_of_transformers(parts: TinyParts, conversation: str) -> None:
    """A completion follows each observation, and every stretch begins where the one before it ended."""
    family, render = parts.processor.family, renderer(parts)
    prompts = [render.prompt(messages) for messages in STRETCHES[conversation]]
    completion = np.arange(7)
    ids, found, position = [], [], 0
    for prompt in prompts:
        for stretch, images in ((prompt.token_ids_L, prompt.images), (completion, ())):
            positions_3L, position = family.positions(stretch, images, position)
            ids.append(stretch)
            found.append(positions_3L)
    images = [each for prompt in prompts for each in prompt.images]
    expected, next_position = whole_conversation(parts, np.concatenate(ids), images)
    np.testing.assert_array_equal(np.concatenate(found, axis=1), expected)
    assert position == next_position


def test_a_servers_ids_hold_one_pad_per_image(parts: TinyParts) -> None:
    """The ids of the text with one mark per image, by the tokenizer itself."""
    render, messages = renderer(parts), user(image(1), " and ", image(2, 64, 48), "?")
    prompt, pad = render.prompt(messages), parts.processor.family.image_token_id
    expected = parts.processor.tokenizer(render.text(messages), add_special_tokens=False)["input_ids"]
    assert prompt.unexpanded_ids_U.tolist() == expected
    assert expected.count(pad) == 2
    assert (prompt.token_ids_L == pad).sum() == sum(each.num_tokens for each in prompt.images)


def test_an_image_without_its_pads_is_refused(parts: TinyParts) -> None:
    prompt = renderer(parts).prompt(user(image(1), "x"))
    with pytest.raises(AssertionError, match="9 pads for 2 images"):
        parts.processor.family.positions(prompt.token_ids_L, prompt.images * 2, 0)
