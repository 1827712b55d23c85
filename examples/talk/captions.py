"""Training of visual tokens that a frozen language model captions correctly.

For each description (colour and shape), one vector is trained in the place of an image's visual token. Its loss is the
cross-entropy of captions under the language model, whose weights do not change. The vision tower is then trained to
output these vectors. Only captions are trained: RL has to teach the model to answer questions with one word.

Axes: `N` descriptions, `L` tokens of a conversation, `D` width of the language model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from examples.talk.language import load_language, load_tokenizer
from examples.talk.network import build_tokenizer
from fovea.models.processor import token_id
from fovea_tools.data_sets.easy_vqa import Contents

INSTRUCTIONS = (
    "Describe the picture.",
    "What does the picture show?",
    "What is in the image?",
    "Describe the image in a few words.",
)
CAPTIONS = (
    "{colour} {shape}",
    "A {colour} {shape}.",
    "The image shows a {colour} {shape}.",
    "There is a {colour} {shape} in the picture.",
    "It is a {shape} and its color is {colour}.",
    "The picture contains a {shape}. The {shape} is {colour}.",
    "The color of the shape is {colour}. The shape is a {shape}.",
)
"""Captions with colour and shape in both orders, so that neither can be predicted only from the other."""
COLOUR_OPENING, SHAPE_OPENING = "The color of the shape is", "The shape is a"
"""Openings of the captions by which a tower is evaluated."""
READ_TOKENS = 4
"""Tokens generated after an opening, more than a colour or a shape needs."""
REPORT_EVERY_STEPS = 10
_FINAL_RATE = 0.02
"""The final learning rate, as a share of the initial one."""
_IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversations:
    token_ids_NL: Tensor
    captions_NL: Tensor
    """The id of the next token if it belongs to the caption, else -100."""


class Speaker:
    """SmolVL's frozen language model, which is given visual tokens in place of images."""

    def __init__(self) -> None:
        self.tokenizer: PreTrainedTokenizerFast = build_tokenizer(load_tokenizer())
        self.network: PreTrainedModel = load_language().requires_grad_(False)
        self._image_id = token_id(self.tokenizer, "<|image_pad|>")

    def words(self, texts: Sequence[str]) -> Tensor:
        """The sum of the word embeddings of each text, [N, D]."""
        embed = self.network.get_input_embeddings()
        return torch.stack([embed(torch.tensor(self.tokenizer(text)["input_ids"])).sum(0) for text in texts])

    def caption_loss(self, visual_tokens_ND: Tensor, conversations: _Conversations) -> Tensor:
        """The mean cross-entropy of the captions' tokens."""
        model: Any = self.network
        embedded_NLD = self._embedded(conversations.token_ids_NL, visual_tokens_ND)
        hidden_NLD = model.model(inputs_embeds=embedded_NLD).last_hidden_state
        is_caption_NL = conversations.captions_NL != _IGNORED
        # the head has 49,152 rows, so it is applied to the positions of captions only
        return F.cross_entropy(model.lm_head(hidden_NLD[is_caption_NL]), conversations.captions_NL[is_caption_NL])

    @torch.no_grad()
    def go_on(self, opening: str, visual_tokens_ND: Tensor) -> list[str]:
        """For each visual token, complete a caption that begins with `opening`, by greedy decoding."""
        prompt = self._prompt(INSTRUCTIONS[0]) + opening
        ids_NL = torch.tensor(self.tokenizer(prompt)["input_ids"]).expand(len(visual_tokens_ND), -1)
        embedded_NLD = self._embedded(ids_NL, visual_tokens_ND)
        model: Any = self.network
        said = model.generate(
            inputs_embeds=embedded_NLD,
            attention_mask=torch.ones_like(ids_NL),
            max_new_tokens=READ_TOKENS,
            do_sample=False,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        return [text.strip() for text in self.tokenizer.batch_decode(said, skip_special_tokens=True)]

    def converse(self, described: Sequence[Contents], rng: np.random.Generator) -> _Conversations:
        """Build one conversation for each description, with a random instruction and a random form of caption."""
        ids, captions = [], []
        for colour, shape in described:
            asked = self._prompt(INSTRUCTIONS[rng.integers(len(INSTRUCTIONS))])
            said = CAPTIONS[rng.integers(len(CAPTIONS))].format(colour=colour, shape=shape)
            prompt_ids: list[int] = self.tokenizer(asked)["input_ids"]
            answer_ids: list[int] = self.tokenizer(said + str(self.tokenizer.eos_token))["input_ids"]
            ids.append(torch.tensor(prompt_ids + answer_ids[:-1]))
            captions.append(torch.tensor([_IGNORED] * (len(prompt_ids) - 1) + answer_ids))
        return _Conversations(
            token_ids_NL=pad_sequence(ids, batch_first=True),  # any value will do: attention is causal
            captions_NL=pad_sequence(captions, batch_first=True, padding_value=_IGNORED),
        )

    def _prompt(self, instruction: str) -> str:
        asked: Any = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": instruction}]}]
        text = self.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str), type(text)
        return text

    def _embedded(self, token_ids_NL: Tensor, visual_tokens_ND: Tensor) -> Tensor:
        """The embeddings of conversations with one image each, the image token replaced by the visual token."""
        words_NLD: Tensor = self.network.get_input_embeddings()(token_ids_NL)
        return torch.where((token_ids_NL == self._image_id)[..., None], visual_tokens_ND[:, None], words_NLD)


def caption_tokens(
    speaker: Speaker,
    described: Sequence[Contents],
    *,
    steps: int,
    learning_rate: float,
    seed: int,
    report: Callable[[str], None],
) -> Tensor:
    """Train a visual token for each description, [N, D], starting from the sum of its words' embeddings.

    Adam's learning rate falls linearly; `report` gets a line every REPORT_EVERY_STEPS steps.
    """
    rng = np.random.default_rng(seed)
    tokens_ND = speaker.words([f" {colour} {shape}" for colour, shape in described]).requires_grad_()
    optimizer = torch.optim.Adam([tokens_ND], lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(_FINAL_RATE, 1 - step / steps))
    for step in range(1, steps + 1):
        loss = speaker.caption_loss(tokens_ND, speaker.converse(described, rng))
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        if step % REPORT_EVERY_STEPS == 0:
            report(f"captions: step {step}/{steps}  loss {loss.item():.3f}")
    return tokens_ND.detach()
