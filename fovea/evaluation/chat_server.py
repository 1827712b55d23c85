"""Evaluation of a model on an OpenAI-compatible server.

The server applies its own chat template and image processor: rows are sent as messages with pictures, not as token ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from fovea.data.prompt_source import PromptedTask, PromptSource
from fovea.errors import EngineError
from fovea.evaluation.evaluator import Answered, Seed
from fovea.models.render import with_results_of_user, with_tool_list, without_special_tokens
from fovea.rollout.collect import request_seed
from fovea.rollout.conversation import Conversations, scored
from fovea.types import Episode, Prompt, Sampling
from fovea_gym.environments.answer_end import find_answer_end
from fovea_gym.environments.base import Environment, Session
from fovea_gym.environments.sessions import unreadable
from fovea_gym.errors import BadRowError, ConfigError, UnscoredError, first_line, named
from fovea_gym.graders.grading import Grading
from fovea_gym.rows.images import OpenImage, png_url
from fovea_gym.types import AnswerEnd, FinishReason, ImageRef, Message, Task, ToolSpec, Turn
from fovea_gym.utils.event_loop import gather_or_cancel
from fovea_gym.utils.http_json import CallError, JsonServer

Chat: TypeAlias = list[dict[str, Any]]
"""Messages in the format of OpenAI's API."""
SEEDS = 1 << 31
"""Seeds are sent modulo this number: every server accepts smaller ones."""
SPECIAL = ("<|", "<start_of_turn>", "<end_of_turn>", "<end_of_utterance>")
"""Starts of special tokens of common models, removed from tool results: the server's own tokens are not known."""
REFUSES_REQUEST = frozenset({400, 413, 422})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer from a server."""

    text: str
    finish: FinishReason


class ChatModel:
    """One of the models that a server offers."""

    def __init__(self, server: JsonServer, name: str, template_kwargs: Mapping[str, object]) -> None:
        self._server = server
        self._template = {"chat_template_kwargs": dict(template_kwargs)} if template_kwargs else {}
        self.name = name

    @staticmethod
    async def of(
        server: JsonServer, name: str | None, template_kwargs: Mapping[str, object] = MappingProxyType({})
    ) -> ChatModel:
        """Connect to the model `name`, or to the only one; ConfigError if no server answers or it lacks that model.

        `template_kwargs` are passed to the server's chat template, in the field that vLLM and SGLang use for them.
        """
        try:
            listed = await server.get("/v1/models")
            names = [str(each["id"]) for each in listed["data"]]
        except (CallError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{server.url}: no OpenAI-compatible server answers there ({error}); start it (fovea serve), or "
                "correct the address or the key (api_key_env=VARIABLE)"
            ) from error
        if name is None and len(names) == 1:
            return ChatModel(server, names[0], template_kwargs)
        if not names:
            raise ConfigError(f"{server.url} serves no model; start it with a model (fovea serve)")
        if name not in names:
            raise ConfigError(f"{server.url} serves {', '.join(names)}; name one of them: {server.url}#{names[0]}")
        return ChatModel(server, name, template_kwargs)

    async def answer(self, chat: Chat, sampling: Sampling, *, n: int, seed: int) -> list[Reply]:
        """Request n answers; BadRowError if the server refuses the request, EngineError if it fails to answer."""
        body = {
            "model": self.name,
            "messages": chat,
            "n": n,
            "seed": seed % SEEDS,
            **_sampled(sampling),
        } | self._template
        try:
            answered = await self._server.post("/v1/chat/completions", body)
        except CallError as error:
            if error.status in REFUSES_REQUEST:
                raise BadRowError(f"the server refuses the request: {error}", "server_refuses") from error
            raise EngineError(f"{self._server.url} gives no answer: {error}; see the server's log") from error
        with named(lambda error: EngineError(f"{self._server.url} sent no valid chat completion: {first_line(error)}")):
            replies = [
                _reply(choice, sampling.answer_end)
                for choice in sorted(answered["choices"], key=lambda choice: choice["index"])
            ]
        if len(replies) != n:
            raise EngineError(f"{self._server.url} sent {len(replies)} answers, but {n} were requested")
        return replies


class ServerAnswers:
    """Lets a model on a server answer rows."""

    def __init__(self, model: ChatModel, environment: Environment, grading: Grading, open_image: OpenImage) -> None:
        self._model = model
        self._environment = environment
        self._grading = grading
        self._open_image = open_image

    async def episodes(
        self, source: PromptSource, rows: Mapping[int, PromptedTask], sampling: Sampling, *, n: int, seed: Seed
    ) -> Sequence[Answered]:
        """Request `n` answers to each row and score them; a row that the server refuses counts as a bad row."""
        places = [(index, number) for index in rows for number in range(n)]
        talks = Conversations.of(self._environment, places, seen_reply=source.seen_reply)

        async def of_row(index: int, task: Task) -> Answered:
            try:
                return await self._of_row(task, index, sampling, n, request_seed(seed[0], index), talks)
            except BadRowError as error:
                return BadRowError(f"{task.id}: {error.problem}", error.reason, error.fix)
            except UnscoredError as error:
                return error

        return await gather_or_cancel(of_row(index, row.task) for index, row in rows.items())

    async def _of_row(
        self, task: Task, index: int, sampling: Sampling, n: int, seed: int, talks: Conversations
    ) -> list[Episode]:
        asked = tuple(self._environment.prompt(task))
        tools = self._environment.tools(task)
        listed = with_tool_list(asked, [tool.spec for tool in tools]) if tools else asked
        chat = await as_chat_in_thread(listed, self._open_image)
        replies = await self._model.answer(chat, sampling, n=n, seed=seed)

        async def episode(number: int, reply: Reply) -> Episode:
            own_seed = request_seed(seed, number)
            speaker = ServerSpeaker(self._model, self._open_image, chat, sampling, own_seed)
            first = Turn(messages=asked, text=reply.text, finish=reply.finish)
            conversation = await talks.go_on(task, own_seed, first, speaker, (index, number))
            return await scored(self._grading, task, conversation)

        return await gather_or_cancel(episode(*each) for each in enumerate(replies))


class ServerSpeaker:
    """A server's model as it takes part in one episode."""

    def __init__(self, model: ChatModel, open_image: OpenImage, chat: Chat, sampling: Sampling, seed: int) -> None:
        """`chat` is the conversation before the first answer."""
        self._model = model
        self._open_image = open_image
        self._chat = chat
        self._sampling = sampling
        self._seed = seed

    async def answer(self, session: Session, turns: Sequence[Turn], messages: Sequence[Message]) -> Turn:
        """Request the server's answer to these messages."""
        try:
            asked = await as_chat_in_thread(messages, self._open_image)
        except BadRowError as error:
            raise unreadable(session, error) from error
        self._chat = [*self._chat, {"role": "assistant", "content": turns[-1].text}, *asked]
        seed = request_seed(self._seed, len(turns))
        (reply,) = await self._model.answer(self._chat, self._sampling, n=1, seed=seed)
        return Turn(messages=tuple(messages), text=reply.text, finish=reply.finish)


async def as_chat_in_thread(messages: Sequence[Message], open_image: OpenImage) -> Chat:
    """Run `as_chat` in a thread, so that the event loop can read the server's responses meanwhile."""
    return await asyncio.to_thread(as_chat, messages, open_image)


class EmptyPrompts:
    """Replaces the renderer of a source if a server answers: the server renders messages itself."""

    most_tokens: int | None = None

    def fewest_tokens(self, _messages: Sequence[Message]) -> int:
        return 0

    def prompt(self, _messages: Sequence[Message], where: str = "", tools: Sequence[ToolSpec] = ()) -> Prompt:
        none = np.zeros(0, dtype=np.int64)
        return Prompt(token_ids_L=none, unexpanded_ids_U=none)

    def observation(self, messages: Sequence[Message], *, after: int, where: str = "") -> Prompt:
        raise AssertionError(
            f"a server renders messages itself, but {where} asked for {len(messages)} after token {after}"
        )


def as_chat(messages: Sequence[Message], open_image: OpenImage) -> Chat:
    """Convert messages to OpenAI's format with PNG pictures inside; BadRowError if a picture cannot be opened.

    Tool results become user messages, because OpenAI's role `tool` requires calls that the server has parsed.
    """
    harmless = with_results_of_user(without_special_tokens(messages, SPECIAL))
    return [
        {"role": message.role, "content": [_part(part, open_image) for part in message.parts]} for message in harmless
    ]


def _part(part: str | ImageRef, open_image: OpenImage) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": png_url(open_image(part))}}


def _sampled(sampling: Sampling) -> dict[str, Any]:
    """Sampling parameters of a request; those that OpenAI's API lacks are sent only if they have an effect."""
    beyond = {"top_k": sampling.top_k or None, "min_p": sampling.min_p or None, "stop": list(sampling.stop) or None}
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        **{name: value for name, value in beyond.items() if value is not None},
    }


def _reply(choice: Mapping[str, Any], end: AnswerEnd | None) -> Reply:
    """Convert a choice to a reply; the text is cut where the answer ends, since a server does not do this."""
    content = choice["message"].get("content")
    text = content if isinstance(content, str) else ""
    if end is not None and (length := find_answer_end(text, end)) is not None:
        return Reply(text=text[:length], finish="stop")
    return Reply(text=text, finish="length" if choice["finish_reason"] == "length" else "stop")
