"""Renders messages into prompts (token ids and pixels), as transformers' processors do, but without torchvision.

Tests compare the result with transformers' token for token and pixel for pixel. No other module applies a chat template
or an image processor to a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from fovea.data.images import ImageOpener, Size
from fovea.errors import BadRowError, DataError
from fovea.models.processor import Processor
from fovea.types import ImageRef, Message, Prompt, PromptImage, ToolSpec
from fovea.utils.shown_text import special_marks, without_marks
from fovea.utils.tool_calls import gemma_calls
from fovea.utils.tool_calls.detect import reads_tools
from fovea.utils.tool_calls.json_calls import CLOSING, OPENING

ANSWER = "the-answer-of-the-model"
"""Placeholder of an answer in the chat template, by which the text after an answer is found."""
SYSTEM_PROMPT = "You are a helpful assistant."
"""System prompt of Qwen2.5-VL's chat template, which leaves it out where there is a system message."""
# the words that Qwen's text models are trained with
LIST = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within {opening}{closing} XML tags:
{opening}
{{"name": <function-name>, "arguments": <args-json-object>}}
{closing}"""


class Renderer:
    """Renders prompts and observations for one model."""

    def __init__(
        self,
        processor: Processor,
        open_image: ImageOpener,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_new_tokens: int = 0,
    ) -> None:
        self._tokenizer = processor.tokenizer
        self._template = processor.chat_template
        self._reads_tools = reads_tools(processor.chat_template)
        # Gemma's writes results behind a call only; after any other answer they are the user's
        self._has_results = self._reads_tools and not gemma_calls.is_written_by(processor.chat_template)
        self._template_kwargs: dict[str, Any] = dict(processor.template_kwargs)
        self._image_processor = processor.image_processor
        self._family = processor.family
        self._marks = special_marks(processor.tokenizer)
        self._banned_ids = frozenset(processor.banned_ids)
        self._open_image = open_image
        self._image_options = processor.family.image_options(processor.image_processor, min_pixels, max_pixels)
        self._image_mark = processor.family.image_mark(processor.image_processor)
        self.most_tokens: int | None = processor.max_positions - max_new_tokens

    def fewest_tokens(self, messages: Sequence[Message]) -> int:
        """A lower bound of the tokens of a prompt: those of its images, only from their headers.

        No image is decoded or processed, and no text is tokenized. BadRowError for an image that cannot be processed.
        """
        return sum(map(self._fewest_visual_tokens, images_of(messages)))

    def prompt(self, messages: Sequence[Message], where: str = "the prompt", tools: Sequence[ToolSpec] = ()) -> Prompt:
        """The prompt of a task, up to where the assistant's answer begins; BadRowError if it cannot be rendered.

        `where` names the row in errors; `tools` are those that the model may call.
        """
        self._check_no_marks(messages, where)
        return self._tokenized(self.text(messages, tools), messages)

    def observation(self, messages: Sequence[Message], *, after: int, where: str = "the reply") -> Prompt:
        """Tokens of the chat template between two answers: end of turn, these messages, start of the next turn.

        `after` is the last token id of the answer. If it is the end-of-turn token, that is not repeated.
        """
        messages = without_special_tokens(messages, self._marks)
        self._check_no_marks(messages, where)
        end = self.token_text(after)
        # the text between two answers is rendered by itself: the answers' sampled ids are never tokenised again
        is_result = messages[0].role == "tool" and gemma_calls.awaits_result(end)
        text = self._text_after_call(messages, where) if is_result else self._text_after_answer(messages)
        return self._tokenized(text.removeprefix(end), messages)

    def _text_after_answer(self, messages: Sequence[Message]) -> str:
        chat = self._chat([Message(role="user", parts=("",)), Message(role="assistant", parts=(ANSWER,)), *messages])
        return self._templated(chat).rpartition(ANSWER)[2]

    def _text_after_call(self, messages: Sequence[Message], where: str) -> str:
        """As `_text_after_answer`, for a template that writes results into the turn of the model that has called."""
        chat = [_as_chat(Message(role="user", parts=("",))), gemma_calls.calling(ANSWER), *map(_as_chat, messages)]
        text = self._templated(chat).rpartition(gemma_calls.call_of(ANSWER))[2]
        if text.count(self._image_mark) < len(images_of(messages)):
            raise DataError(
                f"{where}: the model's chat template leaves out pictures that tools return; put that of a newer "
                "revision of the model into its folder, as chat_template.jinja"
            )
        return text

    def _tokenized(self, text: str, messages: Sequence[Message]) -> Prompt:
        """Token ids of a text that the chat template made of the messages, with their images."""
        images = [self._process(ref) for ref in images_of(messages)]
        ids_U = np.asarray(self._ids(text), dtype=np.int64)
        # tokenised with the text of the images: spaces and line breaks around a mark may merge with it into one token
        ids_L = np.asarray(self._ids(self._expand(text, images)), dtype=np.int64) if images else ids_U
        return Prompt(token_ids_L=ids_L, unexpanded_ids_U=ids_U, images=tuple(images))

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """The messages as written by the chat template, with one image token per image."""
        if tools and not self._reads_tools:
            return self._templated(self._chat(with_tool_list(messages, tools)))
        return self._templated(self._chat(messages), **({"tools": list(map(as_listed, tools))} if tools else {}))

    def _chat(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        if not self._has_results and any(each.role == "tool" for each in messages):
            messages = with_results_of_user(messages)
        return list(map(_as_chat, messages))

    def _templated(self, chat: Any, **tools: Any) -> str:
        text = self._tokenizer.apply_chat_template(
            chat,
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=True,
            **tools,
            **self._template_kwargs,
        )
        assert isinstance(text, str)
        return text

    def box_frame(self, ref: ImageRef) -> Size:
        """Width and height in which the model gives coordinates on an image: 1000 each, where no others are known."""
        return self._family.box_frame(self._process(ref)) or (1000, 1000)

    @property
    def gives_pixels(self) -> bool:
        """True if the model gives coordinates in pixels of the processed image."""
        return self.box_frame(ImageRef(source=np.zeros((64, 64, 3), np.uint8))) != (1000, 1000)

    def target(self, text: str, where: str = "the answer") -> tuple[int, ...]:
        """Token ids of an answer to imitate, with the end token; DataError if it holds a token that is never drawn."""
        ids = self._ids(text)
        for banned in self._banned_ids.intersection(ids):
            raise DataError(
                f"{where}: it contains {self.token_text(banned)}, which completions never hold: it cannot be imitated; "
                "remove that mark from the answer"
            )
        return (*ids, int(self._tokenizer.eos_token_id))

    def token_text(self, index: int) -> str:
        """Text of one token; a special token is written out, such as <|im_end|>."""
        text = self._tokenizer.decode([index])
        assert isinstance(text, str)
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _fewest_visual_tokens(self, ref: ImageRef) -> int:
        size = self._open_image.size(ref)
        with _refusals_named(ref.where):
            return self._family.fewest_tokens(self._image_processor, size, self._image_options)

    def _process(self, ref: ImageRef) -> PromptImage:
        image = self._open_image(ref)
        with _refusals_named(ref.where):
            out = self._image_processor(images=[image], return_tensors="np", **self._image_options)
        return self._family.prompt_image(out)

    def _expand(self, text: str, images: Sequence[PromptImage]) -> str:
        """The text with each image's mark replaced by the text of its visual tokens."""
        first, *others = text.split(self._image_mark)
        assert len(others) == len(images), f"{len(others)} image marks for {len(images)} images"
        pairs = zip(images, others, strict=True)
        return first + "".join(self._family.image_text(image) + after for image, after in pairs)

    def _check_no_marks(self, messages: Sequence[Message], where: str) -> None:
        """Raise BadRowError if the messages contain the text of a special token."""
        # the tokenizer would read it as that token: a row could end a turn or add an image
        texts = [part for message in messages for part in message.parts if isinstance(part, str)]
        for mark in self._marks:
            if any(mark in text for text in texts):
                raise BadRowError(
                    f"{where}: its text contains {mark}, which the model reads as a separate mark; remove that from "
                    "the row, or set data.on_bad_row=skip",
                    "prompt_special_token",
                )


@contextmanager
def _refusals_named(where: str) -> Iterator[None]:
    """Turn the image processor's ValueError into BadRowError."""
    try:
        yield
    except ValueError as error:
        raise BadRowError(
            f"{where}: the image processor refuses it ({error}); fix the row, or set data.on_bad_row=skip",
            "image_shape",
        ) from error


def images_of(messages: Sequence[Message]) -> list[ImageRef]:
    """The images of messages, in order."""
    return [part for message in messages for part in message.parts if isinstance(part, ImageRef)]


def _as_chat(message: Message) -> dict[str, Any]:
    """A message as chat templates take it."""
    named: Mapping[str, str] = {"name": message.tool} if message.tool else {}
    return {"role": message.role, **named, "content": [_part(part) for part in message.parts]}


def _part(part: str | ImageRef) -> dict[str, Any]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}


def as_listed(tool: ToolSpec) -> dict[str, Any]:
    """A tool as chat templates and servers take it."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def with_tool_list(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
    """The messages with the tools in the system message, for a chat template that does not read `tools`."""
    listed = "\n".join(json.dumps(as_listed(tool), ensure_ascii=False) for tool in tools)
    text = LIST.format(tools=listed, opening=OPENING, closing=CLOSING)
    if messages and messages[0].role == "system":
        first, *others = messages
        return [replace(first, parts=(*first.parts, f"\n\n{text}")), *others]
    return [Message(role="system", parts=(f"{SYSTEM_PROMPT}\n\n{text}",)), *messages]


def with_results_of_user(messages: Sequence[Message]) -> list[Message]:
    """The messages with results of tools as messages of the user, one for those in a row.

    For a chat template without the role `tool`; some of these insist on turns of user and assistant.
    """
    found: list[Message] = []
    for is_result, group in groupby(messages, lambda message: message.role == "tool"):
        run = list(group)
        found += [Message(role="user", parts=tuple(_result_parts(run)))] if is_result else run
    return found


def _result_parts(results: Sequence[Message]) -> Iterator[str | ImageRef]:
    for number, result in enumerate(results):
        yield "\n<tool_response>\n" if number else "<tool_response>\n"
        yield from result.parts
        yield "\n</tool_response>"


def without_special_tokens(messages: Sequence[Message], marks: Sequence[str]) -> list[Message]:
    """The messages with a space in each special token that a tool has returned: a web page may hold some."""
    return [replace(each, parts=_harmless(each, marks)) if each.role == "tool" else each for each in messages]


def _harmless(message: Message, marks: Sequence[str]) -> tuple[str | ImageRef, ...]:
    return tuple(without_marks(part, marks) if isinstance(part, str) else part for part in message.parts)
