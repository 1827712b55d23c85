"""Renders messages into prompts (token ids and pixels), as transformers' processors do, but without torchvision.

Tests compare the result with transformers' token for token and pixel for pixel. No other module applies a chat template
or an image processor to a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import groupby, zip_longest
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from fovea.models.processor import Processor, special_marks, token_id
from fovea.models.tool_calls import reads_tools
from fovea.types import Prompt, PromptImage
from fovea_gym.errors import BadRowError, ConfigError, DataError, first_line
from fovea_gym.rows.images import ImageOpener, Size
from fovea_gym.tools.calls import gemma_calls
from fovea_gym.tools.calls.json_calls import CLOSING, OPENING
from fovea_gym.types import ImageRef, Message, ToolSpec
from fovea_gym.utils.shown_text import without_marks

ANSWER = "the-answer-of-the-model"
"""Placeholder for an answer in the chat template, to find the text that the template writes after an answer."""
STAND_IN = "x"
"""Replacement for every text, to find the special tokens that the chat template itself writes."""
PICTURE = ImageRef(source="")
"""Replacement for every picture; one shared object, since references are compared by identity."""
SYSTEM_PROMPT = "You are a helpful assistant."
"""Default system prompt of Qwen2.5-VL's chat template, which omits it if there is a system message."""
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
        # Gemma's template writes tool results only after a call; after any other answer they are user messages
        self._has_results = self._reads_tools and not gemma_calls.is_written_by(processor.chat_template)
        self._template_kwargs: dict[str, Any] = dict(processor.template_kwargs)
        self._image_processor = processor.image_processor
        self._family = processor.family
        self._marks = special_marks(processor.tokenizer)
        self._starts = {ord(mark[0]): f"{mark[0]}\\" for mark in self._marks}
        special = [processor.family.image_token_id, *(token_id(processor.tokenizer, mark) for mark in self._marks)]
        self._is_special = np.isin(np.arange(max(len(processor.tokenizer), *special) + 1), special)
        # also not the stop ids: the end token is appended to an answer
        self._never_inside = frozenset((*processor.banned_ids, *processor.stop_ids))
        self._open_image = open_image
        self._image_options = processor.family.image_options(processor.image_processor, min_pixels, max_pixels)
        self._image_mark = processor.family.image_mark(processor.image_processor)
        self._max_positions = processor.max_positions
        self.most_tokens: int | None = processor.max_positions - max_new_tokens
        # chats of the same form have the same special tokens; a data set has few forms, and each is rendered once more
        self._expected = lru_cache(maxsize=1024)(self._expected_marks)

    def fewest_tokens(self, messages: Sequence[Message]) -> int:
        """A lower bound on the tokens of a prompt: its image tokens, computed from the images' headers.

        No image is decoded or processed, and no text is tokenized. BadRowError for an image that cannot be processed.
        """
        return sum(map(self._fewest_visual_tokens, images_of(messages)))

    def prompt(self, messages: Sequence[Message], where: str = "the prompt", tools: Sequence[ToolSpec] = ()) -> Prompt:
        """The prompt of a task, up to where the assistant's answer begins; BadRowError if it cannot be rendered.

        `where` names the row in errors; `tools` are the tools that the model may call. DataError if the text of a tool
        contains a special token.
        """
        text, ids_U, expected = self._read(messages, tools, None)
        if self._marks_of(ids_U) != expected:
            raise self._prompt_refusal(messages, tools, ids_U, expected, where)
        return self._with_images(text, ids_U, messages, where)

    def observation(self, messages: Sequence[Message], *, after: int, where: str = "the reply") -> Prompt:
        """Tokens of the chat template between two answers: end of turn, these messages, start of the next turn.

        `after` is the last token id of the answer. If it is the end-of-turn token, it is not repeated. Special tokens
        in tool results are made harmless; DataError if another message contains one.
        """
        given = without_special_tokens(messages, self._marks)
        text, ids_U, expected = self._read(given, (), after)
        if self._marks_of(ids_U) != expected and any(each.role == "tool" for each in given):
            # the template has joined characters of several texts into a special token
            given = [
                replace(each, parts=tuple(_escaped(each.parts, self._starts))) if each.role == "tool" else each
                for each in given
            ]
            text, ids_U, expected = self._read(given, (), after)
        if self._marks_of(ids_U) != expected:
            raise DataError(
                f"{where}: the environment's reply contains {self._odd_mark(ids_U, expected)}, which the model reads "
                "as a special token; remove it from the text that the environment returns"
            )
        return self._with_images(text, ids_U, given, where)

    def _read(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], after: int | None
    ) -> tuple[str, NDArray[np.int64], tuple[int, ...]]:
        """The text of a prompt, or of an observation after a token, its ids, and the special ids that it should have.

        The expected special ids come from the same chat with every text and picture replaced, so that only the
        template's own special tokens remain.
        """
        text = self._written(messages, tools, after, self._template_kwargs)
        ids_U = np.asarray(self._ids(text), dtype=np.int64)
        listed = json.dumps([_plain_tool(each, self._starts) for each in tools]) if tools else "[]"
        return text, ids_U, self._expected(tuple(map(_stand_in, messages)), listed, after)

    def _expected_marks(self, messages: tuple[Message, ...], listed: str, after: int | None) -> tuple[int, ...]:
        tools = [ToolSpec(**each) for each in json.loads(listed)]
        text = self._written(messages, tools, after, _escaped(self._template_kwargs, self._starts))
        return self._marks_of(np.asarray(self._ids(text), dtype=np.int64))

    def _marks_of(self, ids_U: NDArray[np.int64]) -> tuple[int, ...]:
        """The special tokens among some ids, in order."""
        return tuple(ids_U[self._is_special[ids_U]].tolist())

    def _odd_mark(self, ids_U: NDArray[np.int64], expected: tuple[int, ...]) -> str:
        """Text of the first special token that differs from the expected ones."""
        pairs = zip_longest(self._marks_of(ids_U), expected)
        found, own = next(pair for pair in pairs if pair[0] != pair[1])
        return self.token_text(own if found is None else found)

    def _prompt_refusal(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        ids_U: NDArray[np.int64],
        expected: tuple[int, ...],
        where: str,
    ) -> DataError:
        """The error for a prompt with a special token that its template did not write; names the text that holds it."""
        mark = f"{self._odd_mark(ids_U, expected)}, which the model reads as a special token"

        def is_sound(some: Sequence[Message], others: Sequence[ToolSpec]) -> bool:
            return self._marks_of(self._read(some, others, None)[1]) == expected

        plain, plain_tools = list(map(_stand_in, messages)), [ToolSpec(**_plain_tool(x, self._starts)) for x in tools]
        if not is_sound(plain, plain_tools):
            raise ConfigError(
                f"model.chat_template_kwargs: the chat template writes these values, and they contain {mark}; "
                "remove it from them"
            )
        if tools and is_sound(messages, plain_tools):
            alone = [[*plain_tools[:i], tool, *plain_tools[i + 1 :]] for i, tool in enumerate(tools)]
            named = [tool.name for tool, each in zip(tools, alone, strict=True) if not is_sound(messages, each)]
            named = named or [tool.name for tool in tools]
            each = f"tool {named[0]}: its" if len(named) == 1 else f"tools {', '.join(named)}: their"
            return DataError(
                f"{where}: {each} name, description or parameters contain {mark}; remove it where the tool is "
                "described, or leave the tool out"
            )
        of_row = [_stand_in(each) if each.role == "system" else each for each in messages]
        if is_sound(of_row, plain_tools):
            whose, place = "its system prompt", "the system prompt"
        else:
            whose, place = "its text", "the row"
        return BadRowError(f"{where}: {whose} contains {mark}", "prompt_special_token", f"remove it from {place}")

    def _written(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        after: int | None,
        arguments: Mapping[str, Any],
    ) -> str:
        """The text that the chat template writes for a prompt, or for an observation after a token."""
        if after is None:
            return self._text(messages, tools, arguments)
        end = self.token_text(after)
        # only the text between two answers is rendered: the sampled ids of the answers are never tokenised again
        if messages[0].role == "tool" and gemma_calls.awaits_result(end):
            # this template writes results into the turn in which the model called the tool
            called = gemma_calls.calling(ANSWER)
            chat = [_as_chat(Message(role="user", parts=("",))), called, *map(_as_chat, messages)]
            return self._templated(chat, arguments).partition(gemma_calls.call_of(ANSWER))[2].removeprefix(end)
        chat = self._chat([Message(role="user", parts=("",)), Message(role="assistant", parts=(ANSWER,)), *messages])
        _, found, text = self._templated(chat, arguments).partition(ANSWER)
        if not found:
            raise DataError(
                "the model's chat template does not write assistant messages; put the template of a newer revision of "
                "the model into its folder, as chat_template.jinja"
            )
        return text.removeprefix(end)

    @cached_property
    def shows_tool_pictures(self) -> bool:
        """False if the chat template leaves out pictures that tools return; DataError if it refuses them."""
        in_turn = self._reads_tools and not self._has_results
        after = token_id(self._tokenizer, gemma_calls.RESULT) if in_turn else int(self._tokenizer.eos_token_id)
        picture = Message(role="tool", tool=STAND_IN, parts=(PICTURE,))
        return self._image_mark in self._written([picture], (), after, self._template_kwargs)

    def _with_images(self, text: str, ids_U: NDArray[np.int64], messages: Sequence[Message], where: str) -> Prompt:
        """The prompt for the text that the chat template wrote for these messages, with their images."""
        refs = images_of(messages)
        if (count := text.count(self._image_mark)) != len(refs):
            of_tools = " that tools return" if any(map(images_of, [[m] for m in messages if m.role == "tool"])) else ""
            raise DataError(
                f"{where}: the model's chat template leaves out pictures{of_tools} (it writes {count} of {len(refs)}); "
                "put the template of a newer revision of the model into its folder, as chat_template.jinja"
            )
        images = [self._process(ref) for ref in refs]
        # tokenised with the text of the images: spaces and line breaks around a mark may merge with it into one token
        ids_L = np.asarray(self._ids(self._expand(text, images)), dtype=np.int64) if images else ids_U
        return Prompt(token_ids_L=ids_L, unexpanded_ids_U=ids_U, images=tuple(images))

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """The messages as written by the chat template, with one image token per image."""
        return self._text(messages, tools, self._template_kwargs)

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSpec], arguments: Mapping[str, Any]) -> str:
        if tools and not self._reads_tools:
            return self._templated(self._chat(with_tool_list(messages, tools)), arguments)
        listed = {"tools": list(map(as_listed, tools))} if tools else {}
        return self._templated(self._chat(messages), {**listed, **arguments})

    def _chat(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        if not self._has_results and any(each.role == "tool" for each in messages):
            messages = with_results_of_user(messages)
        return list(map(_as_chat, messages))

    def _templated(self, chat: Any, arguments: Mapping[str, Any]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                chat,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
                **arguments,
            )
        except TemplateError as error:
            raise DataError(
                f"the model's chat template does not accept these messages ({first_line(error)}); change their roles "
                "or parts, or put another template into the model's folder, as chat_template.jinja"
            ) from error
        assert isinstance(text, str)
        return text

    def box_frame(self, ref: ImageRef) -> Size:
        """Width and height of the coordinate system that the model uses on an image; 1000 each by default."""
        return self._family.box_frame(self._process(ref)) or (1000, 1000)

    @property
    def gives_pixels(self) -> bool:
        """True if the model gives coordinates in pixels of the processed image."""
        return self.box_frame(ImageRef(source=np.zeros((64, 64, 3), np.uint8))) != (1000, 1000)

    def target(self, text: str, where: str = "the answer") -> tuple[int, ...]:
        """Token ids of an answer to imitate, with the end token; DataError if it has a token that is never sampled."""
        ids = self._ids(text)
        for banned in self._never_inside.intersection(ids):
            raise DataError(
                f"{where}: it contains {self.token_text(banned)}, which is never sampled, so the answer cannot be "
                "imitated; remove it from the answer"
            )
        return (*ids, int(self._tokenizer.eos_token_id))

    def demonstration(self, prompt: Prompt, text: str, where: str) -> tuple[int, ...]:
        """Token ids of an answer to imitate after this prompt; DataError if the model has no positions for it."""
        ids = self.target(text, where)
        if prompt.num_tokens + len(ids) > self._max_positions:
            raise DataError(
                f"{where}: its answer has {len(ids)} tokens after a prompt of {prompt.num_tokens}, and the model has "
                f"positions for {self._max_positions}; shorten the answer, or set warmup=null"
            )
        return ids

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


@contextmanager
def _refusals_named(where: str) -> Iterator[None]:
    """Turn the image processor's ValueError into BadRowError."""
    try:
        yield
    except ValueError as error:
        problem = f"{where}: the image processor refuses it ({error})"
        raise BadRowError(problem, "image_shape", "fix the row") from error


def images_of(messages: Sequence[Message]) -> list[ImageRef]:
    """The images of messages, in order."""
    return [part for message in messages for part in message.parts if isinstance(part, ImageRef)]


def _stand_in(message: Message) -> Message:
    """A message with its texts, pictures and names replaced; blank texts stay, since templates test for them."""
    parts = tuple(_stand_in_text(part) if isinstance(part, str) else PICTURE for part in message.parts)
    return Message(role=message.role, parts=parts, tool=_stand_in_text(message.tool))


def _stand_in_text(text: str) -> str:
    return STAND_IN if text.strip() else text


def _plain_tool(tool: ToolSpec, escapes: Mapping[int, str]) -> dict[str, Any]:
    """Fields of a tool, without special tokens in its texts; schema keywords stay, since templates test for them."""
    named = {"name": _stand_in_text(tool.name), "description": _stand_in_text(tool.description)}
    return {**named, "parameters": _escaped(tool.parameters, escapes)}


def _escaped(value: Any, escapes: Mapping[int, str]) -> Any:
    """A nested value with a backslash after each character of its texts that may begin a special token."""
    if isinstance(value, str):
        return value.translate(escapes)
    if isinstance(value, Mapping):
        return {_escaped(key, escapes): _escaped(entry, escapes) for key, entry in value.items()}
    return [_escaped(each, escapes) for each in value] if isinstance(value, list | tuple) else value


def _as_chat(message: Message) -> dict[str, Any]:
    """A message in the format of chat templates."""
    named: Mapping[str, str] = {"name": message.tool} if message.tool else {}
    return {"role": message.role, **named, "content": [_part(part) for part in message.parts]}


def _part(part: str | ImageRef) -> dict[str, Any]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}


def as_listed(tool: ToolSpec) -> dict[str, Any]:
    """A tool in the format of chat templates and servers."""
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
    """The messages with tool results turned into user messages; consecutive results become one message.

    For chat templates without the role `tool`, some of which require user and assistant to alternate.
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
    """The messages with a space inserted into each special token that a tool returned, for example in a web page."""
    return [replace(each, parts=_harmless(each, marks)) if each.role == "tool" else each for each in messages]


def _harmless(message: Message, marks: Sequence[str]) -> tuple[str | ImageRef, ...]:
    parts: list[str | ImageRef] = []
    for is_text, run in groupby(message.parts, lambda part: isinstance(part, str)):
        texts = [without_marks(part, marks) if isinstance(part, str) else part for part in run]
        joined = "".join(map(str, texts)) if is_text else ""
        # most templates write consecutive texts without a separator
        parts += [without_marks(joined, marks)] if any(mark in joined for mark in marks) else texts
    return tuple(parts)
