"""OpenAI's chat completions over a run's engine, for an agent harness on this machine that has the key.

An agent sends the whole conversation with every request. Its beginning is looked up by content, down to the last answer
that was drawn here, and the request goes on from the ids of that answer: what was drawn is never tokenised again. A
conversation with answers that were not drawn here, or that have changed, begins a new episode, which is counted.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fovea.commands.evaluate import engine_of
from fovea.commands.serve import ServerAddress
from fovea.commands.targets import CheckpointTarget, open_model, parse_target
from fovea.environments.prompt_source import RendersPrompts
from fovea.errors import BadRowError, ConfigError, FoveaError, first_line
from fovea.rollout.base import Engine
from fovea.rollout.collect import extended
from fovea.types import Completion, ImageRef, Message, Prompt, Request, Sampling
from fovea.utils.event_loop import wait_for
from fovea.utils.lru_cache import LRUCache
from fovea.view.server import serve
from fovea.wiring.data import make_renderer
from fovea.wiring.images import make_opener

MAX_BODY_BYTES = 64 << 20
MAX_MESSAGES = 1000
TURNS_FILE = "turns.jsonl"
IMAGES_FOLDER = "images"
MAX_REMEMBERED_BYTES = 1 << 30
"""Of the conversations that may go on; the least recently used are forgotten, and then begin new episodes."""
Handler: TypeAlias = Callable[[HttpRequest], Awaitable[Response]]
_PICTURE = re.compile(r"data:image/[\w.+-]+;base64,")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """A conversation up to an answer that was drawn here."""

    episode: str
    """Id of the completion of its first turn."""
    number: int
    """Number of the turn, from 1."""
    prompt: Prompt
    completion: Completion

    @property
    def num_bytes(self) -> int:
        pixels = sum(image.num_bytes for image in self.prompt.images)
        return self.prompt.token_ids_L.nbytes * 2 + self.completion.token_ids_T.nbytes * 2 + pixels


class AgentConversations:
    """Answers requests by an engine, and records every turn in a folder."""

    def __init__(self, engine: Engine, renderer: RendersPrompts, folder: Path, name: str) -> None:
        """`name` begins the ids of completions: it must differ between servers that record in one folder."""
        self._engine = engine
        self._renderer = renderer
        self._folder = folder
        self._name = name
        self._spoken: LRUCache[str, Spoken] = LRUCache(MAX_REMEMBERED_BYTES)
        self._num_requests = self.num_turns = 0
        self.num_unmatched = 0
        """Conversations with earlier answers that were not drawn here, or have changed."""
        (folder / IMAGES_FOLDER).mkdir(parents=True, exist_ok=True)

    async def answer(self, messages: Sequence[Message], sampling: Sampling) -> Spoken:
        """Draw the answer to a conversation and record its turn; BadRowError where that cannot be rendered."""
        self._num_requests += 1
        request_id = f"{self._name}/{self._num_requests}"
        before, new = self._known(messages)
        if before is None:
            observation = prompt = self._renderer.prompt(new, where=request_id)
        else:
            after = int(before.completion.token_ids_T[-1])
            observation = self._renderer.observation(new, after=after, where=request_id)
            prompt = extended(before.prompt, before.completion.token_ids_T, observation)
        self._check_length(prompt)
        (completion,) = await self._engine.generate(Request(id=request_id, prompt=prompt, sampling=sampling))
        spoken = Spoken(
            episode=completion.id if before is None else before.episode,
            number=1 if before is None else before.number + 1,
            prompt=prompt,
            completion=completion,
        )
        answered = (*messages, Message(role="assistant", parts=(completion.text,)))
        *_, key = _keys(answered)
        self._spoken.put(key, spoken, spoken.num_bytes)
        self._record(spoken, before, new, observation, sampling)
        return spoken

    def _check_length(self, prompt: Prompt) -> None:
        most_tokens = self._renderer.most_tokens
        if most_tokens is not None and prompt.num_tokens > most_tokens:
            raise BadRowError(
                f"the conversation has {prompt.num_tokens} tokens, images included, and the model has positions for "
                f"{most_tokens} beside an answer; begin another one",
                "prompt_too_long",
            )

    def _known(self, messages: Sequence[Message]) -> tuple[Spoken | None, Sequence[Message]]:
        """The conversation up to the last earlier answer, where it was drawn here, and the messages after it."""
        ends = [number for number, message in enumerate(messages, 1) if message.role == "assistant"]
        if not ends:
            return None, messages
        before = self._spoken.get(list(_keys(messages))[ends[-1] - 1])
        if before is None or ends[-1] == len(messages):
            self.num_unmatched += 1
            return None, messages
        return before, messages[ends[-1] :]

    def _record(
        self, spoken: Spoken, before: Spoken | None, new: Sequence[Message], observation: Prompt, sampling: Sampling
    ) -> None:
        completion = spoken.completion
        line = {
            "episode": spoken.episode,
            "turn": spoken.number,
            "id": completion.id,
            "continues": None if before is None else before.completion.id,
            "messages": [{"role": each.role, "parts": list(map(self._recorded, each.parts))} for each in new],
            "observation_ids": observation.token_ids_L.tolist(),
            "image_keys": [image.key for image in observation.images],
            "text": completion.text,
            "token_ids": completion.token_ids_T.tolist(),
            "logprobs": [float(logprob) for logprob in completion.logprobs_T],
            "temperature": sampling.temperature,
            "finish": completion.finish,
            "version": completion.version,
        }
        with (self._folder / TURNS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.num_turns += 1

    def _recorded(self, part: str | ImageRef) -> dict[str, str]:
        """A text, or the name of a picture's file, which is written once."""
        if isinstance(part, str):
            return {"text": part}
        assert isinstance(part.source, bytes), "pictures of requests are encoded"
        name = hashlib.sha256(part.source).hexdigest()
        file = self._folder / IMAGES_FOLDER / name
        if not file.exists():
            file.write_bytes(part.source)
        return {"image": f"{IMAGES_FOLDER}/{name}"}


def _keys(messages: Sequence[Message]) -> Iterator[str]:
    digest = hashlib.sha256()
    for message in messages:
        digest.update(f"{message.role}\0{len(message.parts)}\0".encode())
        for part in message.parts:
            source = part.source if isinstance(part, ImageRef) else part.encode("utf-8", "surrogatepass")
            assert isinstance(source, bytes), "pictures of requests are encoded"
            digest.update(f"{type(part).__name__}\0{len(source)}\0".encode() + source)
        yield digest.hexdigest()


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ImageUrl(BaseModel):
    """An address of a picture; the wish for a detail is ignored."""

    url: str


class ImagePart(_Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


Part: TypeAlias = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ChatMessage(BaseModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[Part]


class ChatRequest(BaseModel):
    """A request; fields without an effect here, such as `user`, are ignored, and others that would have one refused."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: str = ""
    n: Literal[1] = 1
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    response_format: None = None
    stream: bool = False
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    logprobs: bool = False


class AgentServer:
    """The endpoints `/v1/chat/completions` and `/v1/models`."""

    def __init__(self, conversations: AgentConversations, *, name: str, key: str, max_new_tokens: int) -> None:
        """`name` is the model's; requests get at most `max_new_tokens`."""
        self._conversations = conversations
        self.name = name
        self._key = f"Bearer {key}".encode()
        self._max_new_tokens = max_new_tokens

    def app(self) -> Starlette:
        """The application, every route of which wants the key."""
        return Starlette(
            routes=[
                Route("/v1/models", self._with_key(self._models)),
                Route("/v1/chat/completions", self._with_key(self._chat), methods=["POST"]),
            ]
        )

    def _with_key(self, answer: Handler) -> Handler:
        async def checked(request: HttpRequest) -> Response:
            given = request.headers.get("authorization", "").encode()
            if not secrets.compare_digest(given, self._key):
                return _error(401, "the key is missing or wrong; send it as `Authorization: Bearer KEY`")
            return await answer(request)

        return checked

    async def _models(self, _request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "fovea"}]})

    async def _chat(self, request: HttpRequest) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                return _error(413, f"the request has more than {MAX_BODY_BYTES >> 20} MiB; send smaller pictures")
        try:
            asked = ChatRequest.model_validate_json(bytes(body))
            messages = [_message(each) for each in asked.messages]
            spoken = await self._conversations.answer(messages, self._sampling(asked))
        except ValidationError as error:
            return _error(400, first_line(error))
        except BadRowError as error:
            return _error(400, str(error))
        except FoveaError as error:
            return _error(500, str(error))
        answered = _completion(spoken, self.name, with_logprobs=asked.logprobs)
        return _streamed(answered) if asked.stream else JSONResponse(answered)

    def _sampling(self, asked: ChatRequest) -> Sampling:
        wanted = asked.max_completion_tokens or asked.max_tokens or self._max_new_tokens
        stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
        return Sampling(
            max_new_tokens=min(wanted, self._max_new_tokens),
            temperature=asked.temperature,
            top_p=asked.top_p,
            stop=stop,
            seed=secrets.randbits(63) if asked.seed is None else asked.seed,
        )


def _message(sent: ChatMessage) -> Message:
    """A message of a request; BadRowError for a picture that is not sent as data."""
    if isinstance(sent.content, str):
        return Message(role=sent.role, parts=(sent.content,))
    return Message(role=sent.role, parts=tuple(map(_part, sent.content)))


def _part(sent: TextPart | ImagePart) -> str | ImageRef:
    if isinstance(sent, TextPart):
        return sent.text
    url = sent.image_url.url
    found = _PICTURE.match(url)
    if found is None:
        raise BadRowError(f"the picture {url[:60]!r} is not a data URI; send data:image/png;base64,...", "image_url")
    try:
        return ImageRef(source=base64.b64decode(url[found.end() :], validate=True), where="a picture of the request")
    except ValueError as error:
        raise BadRowError("a picture of the request is not base64; encode it again", "image_damaged") from error


def _completion(spoken: Spoken, name: str, *, with_logprobs: bool) -> dict[str, Any]:
    """OpenAI's answer; with log-probs also the ids that were drawn, under vLLM's name `token_ids`."""
    drawn, num_prompt = spoken.completion, spoken.prompt.num_tokens
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": drawn.text},
        "finish_reason": drawn.finish,
    }
    if with_logprobs:
        ids = drawn.token_ids_T.tolist()
        pairs = zip(ids, drawn.logprobs_T, strict=True)
        choice["logprobs"] = {
            "content": [
                {"token": f"token_id:{index}", "logprob": float(logprob), "bytes": None, "top_logprobs": []}
                for index, logprob in pairs
            ]
        }
        choice["token_ids"] = ids
    return {
        "id": drawn.id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": name,
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": len(drawn.token_ids_T),
            "total_tokens": num_prompt + len(drawn.token_ids_T),
        },
    }


def _streamed(answered: Mapping[str, Any]) -> Response:
    """The whole answer as one event: nothing is sent before it is recorded."""
    (choice,) = answered["choices"]
    event = {
        **answered,
        "object": "chat.completion.chunk",
        "choices": [{**{key: value for key, value in choice.items() if key != "message"}, "delta": choice["message"]}],
    }
    return Response(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n", media_type="text/event-stream")


def _error(status: int, message: str) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": None}}, status_code=status)


def serve_agents(source: str, folder: Path, address: ServerAddress, say: Callable[[str], None], *, trust: bool) -> None:
    """Serve a run's checkpoint to agents on this machine until Ctrl-C; ConfigError for what is not a run."""
    target = parse_target(source)
    if not isinstance(target, CheckpointTarget):
        raise ConfigError(f"{source}: not a run or a checkpoint, which --for-agents serves; name one")
    key = address.api_key() or secrets.token_urlsafe(24)
    opened = open_model(target, None, [], trust=trust)
    config, engine = opened.config, engine_of(opened, opened.config)
    tokens = config.rollout.max_new_tokens
    opener = make_opener(config.data, target.run)
    renderer = make_renderer(config.model, opened.processor, opener, max_new_tokens=tokens)
    # of this start: a later server that records in the same folder begins its ids differently
    conversations = AgentConversations(engine, renderer, folder, f"agents-{secrets.token_hex(4)}")
    server = AgentServer(conversations, name=target.run.resolve().name, key=key, max_new_tokens=tokens)
    shown = f"${address.api_key_env}" if address.api_key_env else key
    ready = f"{server.name} is served; Ctrl-C ends it. Episodes go to {folder}\n"
    try:
        serve(server.app(), address.port, lambda url: say(f"{ready}OPENAI_BASE_URL={url}v1 OPENAI_API_KEY={shown}"))
    finally:
        wait_for(engine.close())
        say(
            f"{conversations.num_turns} turns recorded in {folder}; {conversations.num_unmatched} conversations had "
            "answers that were not drawn here, and began new episodes"
        )
