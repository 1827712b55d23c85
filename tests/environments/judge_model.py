"""A real judge at a tiny size: a LLaVA of transformers' own classes that has learned to look at a colour.

It gives 9 to a description that names the colour of the image and 1 to another; nothing about it is canned.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from fovea.models.families.qwen_vl import IMAGE_PAD
from fovea.models.tiny import CHAT_TEMPLATE, build_tokenizer

SIDE_PX = 16
PATCH_PX = 8
COLOURS = {"red": (250, 10, 10), "blue": (10, 10, 250)}
PROMPT = "Grade this: {answer}"
QUESTION = "Describe the image."
MAX_STEPS = 400


def picture(colour: str) -> Image.Image:
    return Image.new("RGB", (SIDE_PX, SIDE_PX), COLOURS[colour])


def description(colour: str) -> str:
    return f"a {colour} square"


def make_judge(folder: Path) -> None:
    """Train the model and save it as a folder that `transformers serve` loads."""
    cases = list(itertools.product(COLOURS, COLOURS))
    texts = [PROMPT.replace("{answer}", description(colour)) for colour in COLOURS]
    tokenizer = build_tokenizer([*texts, "Score: 9", "Score: 1"] * 20, 400)
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": SIDE_PX}, crop_size=SIDE_PX),
        tokenizer=tokenizer,
        patch_size=PATCH_PX,
        vision_feature_select_strategy="full",
        image_token=IMAGE_PAD,
        chat_template=CHAT_TEMPLATE,
        num_additional_image_tokens=1,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(_config(tokenizer))
    _train(model, processor, cases)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def _config(tokenizer: PreTrainedTokenizerFast) -> LlavaConfig:
    width = 64
    shared = {"hidden_size": width, "intermediate_size": width, "num_attention_heads": 2, "num_hidden_layers": 2}
    return LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=SIDE_PX, patch_size=PATCH_PX, **shared),
        text_config=LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=2048, **shared),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_PAD),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )


def _train(model: LlavaForConditionalGeneration, processor: LlavaProcessor, cases: Sequence[tuple[str, str]]) -> None:
    batch, labels = _batch(processor, cases)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0)
    model.train()
    for _ in range(MAX_STEPS):
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.01:
            break
    assert loss.item() < 0.05, f"the judge has not learned to look: loss {loss.item():.3f}"
    model.eval()


def _batch(processor: LlavaProcessor, cases: Sequence[tuple[str, str]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    prompts = []
    for _, said in cases:
        parts = [{"type": "image"}, {"type": "text", "text": PROMPT.replace("{answer}", description(said))}]
        prompts.append(processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True))
    replies = [f"Score: {9 if shown == said else 1}<|im_end|>" for shown, said in cases]
    images = [picture(shown) for shown, _ in cases]
    texts = [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]
    batch = dict(processor(images=images, text=texts, padding=True, return_tensors="pt"))
    labels = batch["input_ids"].clone()
    for row, reply in enumerate(replies):
        # the reply is all that is learned, up to the padding
        end = int(batch["attention_mask"][row].sum())
        labels[row, : end - len(processor.tokenizer(reply)["input_ids"])] = labels[row, end:] = -100
    return batch, labels
