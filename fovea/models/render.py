"""From messages to token ids and pixels: the only caller of a chat template and of an image processor.

Equal to transformers' own processor token for token and pixel for pixel, without needing torchvision.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fovea.data.images import OpenImage
from fovea.errors import BadRowError
from fovea.models.loaded import IMAGE_PAD, ModelParts, token_id
from fovea.models.positions import prompt_positions
from fovea.types import ImageRef, Message, Prompt, PromptImage


class Renderer:
    """Makes prompts for one model."""

    def __init__(
        self,
        parts: ModelParts,
        open_image: OpenImage,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> None:
        self._tokenizer = parts.tokenizer
        self._template = parts.chat_template
        self._processor = parts.image_processor
        self._marks = [token.content for token in parts.tokenizer.added_tokens_decoder.values() if token.special]
        self._open_image = open_image
        self._size = pixel_limits(parts.image_processor.size, min_pixels, max_pixels)
        self._image_pad_id = token_id(parts.tokenizer, IMAGE_PAD)

    def prompt(self, messages: Sequence[Message], where: str = "the prompt") -> Prompt:
        """Token ids with expanded image pads, pixels, and M-RoPE positions, ending where the assistant begins.

        `where` is what an error calls the row.
        """
        self._check_no_marks(messages, where)
        images = [self._process(part) for message in messages for part in message.parts if isinstance(part, ImageRef)]
        text = self._expand_pads(self.text(messages), images)
        token_ids_L = np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
        positions_3L, next_position = prompt_positions(
            token_ids_L,
            [image.grid_thw for image in images],
            image_pad_id=self._image_pad_id,
            merge_size=self._processor.merge_size,
        )
        return Prompt(
            token_ids_L=token_ids_L,
            positions_3L=positions_3L,
            next_position=next_position,
            images=tuple(images),
        )

    def text(self, messages: Sequence[Message]) -> str:
        """What the chat template makes of the messages, one pad per image."""
        chat: Any = [{"role": message.role, "content": [_part(part) for part in message.parts]} for message in messages]
        text = self._tokenizer.apply_chat_template(
            chat, chat_template=self._template, tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str)
        return text

    def target(self, text: str) -> tuple[int, ...]:
        """Token ids of an answer, with the end token."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return (*ids, int(self._tokenizer.eos_token_id))

    def token_text(self, index: int) -> str:
        """What one token stands for, special ones by name."""
        text = self._tokenizer.decode([index])
        assert isinstance(text, str)
        return text

    def _process(self, ref: ImageRef) -> PromptImage:
        image = self._open_image(ref)
        try:
            out = self._processor(images=[image], size=self._size, return_tensors="np")
        except ValueError as error:
            raise BadRowError(
                f"{ref.where}: the image processor refuses it ({error}); fix the row, or set data.on_bad_row=skip",
                "image_shape",
            ) from error
        pixels_NC = np.ascontiguousarray(out["pixel_values"], dtype=np.float32)
        time, height, width = (int(n) for n in out["image_grid_thw"][0])
        key = hashlib.blake2b(pixels_NC.tobytes(), digest_size=16, person=f"{height}x{width}".encode()[:16])
        return PromptImage(key=key.hexdigest(), pixels_NC=pixels_NC, grid_thw=(time, height, width))

    def _expand_pads(self, text: str, images: Sequence[PromptImage]) -> str:
        pieces = text.split(IMAGE_PAD)
        assert len(pieces) == len(images) + 1, f"{len(pieces) - 1} image pads for {len(images)} images"
        merged = self._processor.merge_size**2
        for index, image in enumerate(images):
            pieces[index] += IMAGE_PAD * (int(np.prod(image.grid_thw)) // merged)
        return "".join(pieces)

    def _check_no_marks(self, messages: Sequence[Message], where: str) -> None:
        """A row must not write what only the template may: where a turn ends, where an image stands."""
        texts = [part for message in messages for part in message.parts if isinstance(part, str)]
        for mark in self._marks:
            if any(mark in text for text in texts):
                raise BadRowError(
                    f"{where}: its text contains {mark}, which the model reads as a mark of its own; remove that from "
                    "the row, or set data.on_bad_row=skip",
                    "prompt_special_token",
                )


def pixel_limits(own: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, int]:
    """The processor's names for the limits; a limit that is set moves the model's own other one out of its way."""
    smallest = min_pixels or min(own["shortest_edge"], max_pixels or own["shortest_edge"])
    largest = max_pixels or max(own["longest_edge"], min_pixels or own["longest_edge"])
    return {"shortest_edge": smallest, "longest_edge": largest}


def _part(part: str | ImageRef) -> dict[str, Any]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
