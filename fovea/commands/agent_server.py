"""OpenAI's chat completions over a run's engine, for an agent harness on this machine that has the key."""

from __future__ import annotations

import base64
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fovea.commands.agent_conversations import AgentConversations, Spoken
from fovea.commands.serve import ServerAddress
from fovea.commands.targets import CheckpointTarget, open_model, parse_target
from fovea.config.backends import EmbeddedSettings
from fovea.errors import BadRowError, ConfigError, FoveaError, first_line
from fovea.types import ImageRef, Message, Sampling
from fovea.utils.event_loop import wait_for
from fovea.view.server import serve
from fovea.wiring.data import make_renderer
from fovea.wiring.engine import make_embedded
from fovea.wiring.images import make_opener

MAX_BODY_BYTES = 64 << 20
MAX_MESSAGES = 1000
_PICTURE = re.compile(r"data:image/[\w.+-]+;base64,")


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

    def _with_key(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode()
            if not secrets.compare_digest(given, self._key):
                return _error(401, "the key is missing or wrong; send it as `Authorization: Bearer KEY`")
            return await answer(request)

        return checked

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "fovea"}]})

    async def _chat(self, request: Request) -> Response:
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
        choice["logprobs"] = {"content": [_logprob(index, float(logprob)) for index, logprob in pairs]}
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


def _logprob(index: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{index}", "logprob": logprob, "bytes": None, "top_logprobs": []}


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
    """Serve a run's checkpoint to agents on this machine until Ctrl-C, recording in `folder`.

    Without `api_key_env` a key is made and printed. ConfigError for what is not a run.
    """
    target = parse_target(source)
    if not isinstance(target, CheckpointTarget):
        raise ConfigError(f"{source}: not a run or a checkpoint, which --for-agents serves; name one")
    key = address.api_key() or secrets.token_urlsafe(24)
    opened = open_model(target, None, [], trust=trust)
    config, settings = opened.config, opened.config.rollout.engine
    embedded = settings if isinstance(settings, EmbeddedSettings) else EmbeddedSettings()
    # no update follows, so that the engine need not keep activations for reuse
    engine = make_embedded(embedded.model_copy(update={"reuse_gib": 0.0}), opened.processor, opened.vlm)
    engine.load_weights(dict(engine.own_weights()), 0)
    tokens = config.rollout.max_new_tokens
    renderer = make_renderer(
        config.model, opened.processor, make_opener(config.data, target.run), max_new_tokens=tokens
    )
    # of this start: a later server that records in the same folder begins its ids differently
    conversations = AgentConversations(engine, renderer, folder, f"agents-{secrets.token_hex(4)}")
    server = AgentServer(conversations, name=target.run.resolve().name, key=key, max_new_tokens=tokens)
    shown = f"${address.api_key_env}" if address.api_key_env else key
    try:
        serve(server.app(), address.port, lambda url: say(_ready(server.name, url, shown, folder)))
    finally:
        wait_for(engine.close())
        say(
            f"{conversations.num_turns} turns recorded in {folder}; {conversations.num_unmatched} conversations had "
            "answers that were not drawn here, and began new episodes"
        )


def _ready(name: str, url: str, key: str, folder: Path) -> str:
    return f"{name} is served; Ctrl-C ends it. Episodes go to {folder}\nOPENAI_BASE_URL={url}v1 OPENAI_API_KEY={key}"
