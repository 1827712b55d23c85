"""Captions through the frozen language model: the loss is transformers' own, and it trains the visual tokens alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLForConditionalGeneration

pytest.importorskip("easy_vqa", reason="the package easy-vqa is not installed (the extra talk)")
pytest.importorskip("gguf", reason="the package gguf is not installed (the extra talk)")

from examples.talk.captions import CAPTIONS, Speaker, caption_tokens
from examples.talk.folder import read_tower
from examples.talk.language import package_folder
from examples.talk.network import build_image_processor, build_network
from fovea_gym.errors import MissingExtraError
from fovea_tools.data_sets.easy_vqa import Contents, EasyVqaPicture, split_pictures

LOSS = 1e-4
"""Largest difference of losses of some 3 nats in float32: the order of sums in other kernels."""
DESCRIBED = [("red", "circle"), ("teal", "rectangle"), ("yellow", "triangle")]

pytestmark = pytest.mark.slow
try:
    package_folder()
except MissingExtraError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    return Speaker()


@pytest.fixture(scope="module")
def network(speaker: Speaker) -> Qwen2VLForConditionalGeneration:
    return build_network(speaker.network, speaker.tokenizer, read_tower(None))


def test_the_loss_is_that_of_transformers_with_the_pictures(
    speaker: Speaker, network: Qwen2VLForConditionalGeneration
) -> None:
    pictures = [picture for picture in split_pictures(0)["test"] if picture.contents is not None][:3]
    conversations = speaker.converse([contents(picture) for picture in pictures], np.random.default_rng(0))
    ids_NL, captions_NL = conversations.token_ids_NL, conversations.captions_NL
    patches = build_image_processor()(images=[Image.open(picture.file) for picture in pictures], return_tensors="pt")
    # transformers predicts a label from the token before it
    beyond_N1 = torch.zeros(len(pictures), 1, dtype=torch.long)
    ids = torch.cat([ids_NL, beyond_N1], dim=1)
    with torch.no_grad():
        theirs = network(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == network.config.image_token_id).long(),
            labels=torch.cat([beyond_N1 - 100, captions_NL], dim=1),
            **patches,
        ).loss
        seen_ND = network.model.visual(patches["pixel_values"], grid_thw=patches["image_grid_thw"]).pooler_output
        ours = speaker.caption_loss(seen_ND, conversations)
    torch.testing.assert_close(ours, theirs, atol=LOSS, rtol=0)


def test_the_caption_alone_is_trained_on(speaker: Speaker) -> None:
    captions_NL = speaker.converse(DESCRIBED, np.random.default_rng(3)).captions_NL
    for (colour, shape), row_L in zip(DESCRIBED, captions_NL, strict=True):
        said = speaker.tokenizer.decode(row_L[row_L >= 0])
        forms = [form.format(colour=colour, shape=shape) + "<|im_end|>" for form in CAPTIONS]
        assert said in forms, said


def test_visual_tokens_learn_and_the_language_model_stays(speaker: Speaker) -> None:
    before = {name: weight.clone() for name, weight in speaker.network.state_dict().items()}
    start_ND = speaker.words([f" {colour} {shape}" for colour, shape in DESCRIBED])
    tokens_ND = caption_tokens(speaker, DESCRIBED, steps=15, learning_rate=0.05, seed=0, report=lambda _: None)
    conversations = speaker.converse(DESCRIBED, np.random.default_rng(7))
    with torch.no_grad():
        first, last = (speaker.caption_loss(each, conversations) for each in (start_ND, tokens_ND))
    assert last < 0.8 * first
    assert all(torch.equal(weight, before[name]) for name, weight in speaker.network.state_dict().items())


def contents(picture: EasyVqaPicture) -> Contents:
    assert picture.contents is not None
    return picture.contents
