"""A model as judge: one call of a chat endpoint per completion.

A call that fails raises; it is never a score of 0. `limited_calls` bounds the time of a call, its retries and the
number of calls at once. The score is parsed strictly: one line `Score: N`, the last one, within range.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
from collections.abc import Sequence

import httpx2
from PIL.Image import Image

from fovea.config.environments import Judge
from fovea.environments.graders.base import NoScoreError, TryAgainError
from fovea.environments.graders.limited_calls import CallLimits
from fovea.errors import ConfigError
from fovea.utils.addresses import is_loopback
from fovea.utils.http_json import MAY_PASS, bearer
from fovea.utils.shown_text import without_secrets

KEY = "environment.judge"
"""Settings of the judge of captions."""
RETRIES = 3
"""Further tries with growing pauses, where the server is unreachable, busy or slow, or its reply holds no score."""
MAX_SCORE = 10.0
"""Highest score, by which scores are divided; prompts ask for a number from 0 to it."""
MAX_IMAGE_SIDE_PX = 1024
"""Longest side of an image that is sent: a judge takes more tokens for larger ones."""
MAX_REPLY_BYTES = 1 << 20
_WRONG_SETTING = {401, 403, 404}
_SLOT = re.compile(r"\{(question|answer|references)\}")
_SCORE = re.compile(
    r"^[\s*_#>-]*score[\s*_]*:[\s*_]*(\d{1,6}(?:\.\d{1,6})?)(?:\s*/\s*(\d{1,6}))?[\s*_.]*$", re.IGNORECASE
)


def limits_of(settings: Judge, key: str = KEY) -> CallLimits:
    """The limits of the calls of a judge whose settings are at `key`."""
    return CallLimits(
        name=f"the judge at {without_secrets(settings.url)}",
        settings=f"{key}.",
        calls_at_once=settings.max_concurrency,
        timeout_seconds=settings.timeout_seconds,
        max_retries=RETRIES,
        on_failure=settings.on_failure,
    )


class JudgeClient:
    """A client of a judge; all of its calls are made on one event loop, on which it is closed."""

    def __init__(self, settings: Judge, key: str = KEY) -> None:
        """`key` is where the settings are, for messages."""
        self._settings = settings
        self._key = key
        headers = {"content-type": "application/json", **bearer(settings.api_key_env, f"{key}.api_key_env")}
        self._client = httpx2.AsyncClient(
            headers=headers,
            timeout=None,
            follow_redirects=False,
            # httpx2 opens 100 by itself, for which further calls would wait within their time
            limits=httpx2.Limits(max_connections=settings.max_concurrency),
            # ignore HTTP_PROXY for localhost: the proxy would connect to its own localhost
            trust_env=not is_loopback(httpx2.URL(settings.url).host),
        )

    async def aclose(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def score(self, images: Sequence[Image], question: str, answer: str, references: Sequence[str]) -> float:
        """The judge's score over `MAX_SCORE`: 0..1.

        Raises TryAgainError where another call may succeed, NoScoreError for any other refusal, and ConfigError for a
        wrong address, model or key.
        """
        body = await asyncio.to_thread(self._body, images, question, answer, references)
        try:
            reply = await self._call(body)
        except httpx2.HTTPError as error:
            raise TryAgainError(f"gave no score: {type(error).__name__}: {error}") from error
        return parsed_score(reply) / MAX_SCORE

    def _body(self, images: Sequence[Image], question: str, answer: str, references: Sequence[str]) -> bytes:
        settings = self._settings
        texts = {"question": question, "answer": answer, "references": "\n".join(references)}
        text = _SLOT.sub(lambda slot: _untagged(texts[slot[1]]), settings.prompt)
        parts: list[dict[str, object]] = [_image_part(image) for image in images]
        message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
        body = {"model": settings.model, "messages": [message], "max_tokens": settings.max_new_tokens, "temperature": 0}
        return json.dumps(body).encode("utf-8", "replace")

    async def _call(self, body: bytes) -> str:
        url = self._settings.url.rstrip("/") + "/chat/completions"
        async with self._client.stream("POST", url, content=body) as response:
            content = await _bounded(response)
        if response.status_code in _WRONG_SETTING:
            raise ConfigError(
                f"{self._key}: {without_secrets(url)} answers {response.status_code} ({_shown(content)}); "
                "correct url, model or api_key_env"
            )
        if response.status_code in MAY_PASS:
            raise TryAgainError(f"gave no score: status {response.status_code} ({_shown(content)})")
        if response.status_code != httpx2.codes.OK:
            raise NoScoreError(f"gave no score: status {response.status_code} ({_shown(content)})")
        return _text_of(content)


def parsed_score(reply: str) -> float:
    """The number of the one line `Score: N`, which is the last; TryAgainError for any other reply."""
    lines = [line for line in reply.splitlines() if line.strip()]
    scores = [match for match in map(_SCORE.match, lines) if match]
    if len(scores) != 1 or not _SCORE.match(lines[-1]):
        raise TryAgainError(
            f"gave no score: the reply does not end with its only line 'Score: N' ({_shown(reply.encode())})"
        )
    score, out_of = float(scores[0][1]), scores[0][2]
    if score > MAX_SCORE or (out_of is not None and float(out_of) != MAX_SCORE):
        raise TryAgainError(
            f"gave no score: the reply's {scores[0][0].strip()[:40]!r} is not within 0 to {MAX_SCORE:g}"
        )
    return score


def _untagged(text: str) -> str:
    """Text of the policy or the data set that cannot close the tags around it."""
    return text.replace("</", "< /")


def _image_part(image: Image) -> dict[str, object]:
    small = image.copy()
    small.thumbnail((MAX_IMAGE_SIDE_PX, MAX_IMAGE_SIDE_PX))
    file = io.BytesIO()
    small.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


async def _bounded(response: httpx2.Response) -> bytes:
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > MAX_REPLY_BYTES:
            raise TryAgainError(f"gave no score: the reply is longer than {MAX_REPLY_BYTES} bytes")
    return bytes(content)


def _text_of(content: bytes) -> str:
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise TryAgainError(f"gave no score: the reply is not a chat completion ({_shown(content)})")
    return text


def _shown(content: bytes) -> str:
    """The start of a server's response, on one line."""
    return repr(content[:120].decode("utf-8", "replace"))
