"""A model as judge: one call of a chat endpoint per completion.

A call that fails raises; it is never a score of 0. `limited_calls` bounds the time of a call, its retries and the
number of calls at once. The score is parsed strictly: one line `Score: N`, the last one, within range.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import httpx2
from PIL.Image import Image

from fovea.config.environments import Judge
from fovea.data.images import png_url
from fovea.environments.graders.base import NoScoreError, TryAgainError
from fovea.environments.graders.limited_calls import CallLimits
from fovea.errors import ConfigError
from fovea.utils.http_json import CallBounds, CallError, JsonServer, bearer
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
        bounds = CallBounds(
            timeout_seconds=settings.timeout_seconds,
            calls_at_once=settings.max_concurrency,
            max_reply_bytes=MAX_REPLY_BYTES,
        )
        self._server = JsonServer(settings.url.rstrip("/"), bounds, bearer(settings.api_key_env, f"{key}.api_key_env"))

    async def aclose(self) -> None:
        """Close its connections."""
        await self._server.close()

    async def score(self, images: Sequence[Image], question: str, answer: str, references: Sequence[str]) -> float:
        """The judge's score over `MAX_SCORE`: 0..1.

        Raises TryAgainError where another call may succeed, NoScoreError for any other refusal, and ConfigError for a
        wrong address, model or key.
        """
        body = await asyncio.to_thread(self._body, images, question, answer, references)
        try:
            reply = await self._server.post("/chat/completions", body)
        except CallError as error:
            if error.status in _WRONG_SETTING:
                address = f"{without_secrets(self._server.url)}/chat/completions"
                raise ConfigError(f"{self._key}: {address}: {error}; correct url, model or api_key_env") from error
            kind = TryAgainError if error.may_pass or error.status == httpx2.codes.OK else NoScoreError
            raise kind(f"gave no score: {error}") from error
        return parsed_score(_text_of(reply)) / MAX_SCORE

    def _body(
        self, images: Sequence[Image], question: str, answer: str, references: Sequence[str]
    ) -> dict[str, object]:
        settings = self._settings
        texts = {"question": question, "answer": answer, "references": "\n".join(references)}
        # a text of the policy or the data set must not close the tags around it
        text = _SLOT.sub(lambda slot: texts[slot[1]].replace("</", "< /"), settings.prompt)
        parts: list[dict[str, object]] = [_image_part(image) for image in images]
        message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
        return {
            "model": settings.model,
            "messages": [message],
            "max_tokens": settings.max_new_tokens,
            "temperature": 0,
        }


def parsed_score(reply: str) -> float:
    """The number of the one line `Score: N`, which is the last; TryAgainError for any other reply."""
    lines = [line for line in reply.splitlines() if line.strip()]
    scores = [match for match in map(_SCORE.match, lines) if match]
    if len(scores) != 1 or not _SCORE.match(lines[-1]):
        raise TryAgainError(f"gave no score: the reply does not end with its only line 'Score: N' ({reply[:120]!r})")
    score, out_of = float(scores[0][1]), scores[0][2]
    if score > MAX_SCORE or (out_of is not None and float(out_of) != MAX_SCORE):
        raise TryAgainError(
            f"gave no score: the reply's {scores[0][0].strip()[:40]!r} is not within 0 to {MAX_SCORE:g}"
        )
    return score


def _image_part(image: Image) -> dict[str, object]:
    small = image.copy()
    small.thumbnail((MAX_IMAGE_SIDE_PX, MAX_IMAGE_SIDE_PX))
    return {"type": "image_url", "image_url": {"url": png_url(small)}}


def _text_of(reply: Any) -> str:
    try:
        text = reply["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        text = None
    if not isinstance(text, str):
        raise TryAgainError(f"gave no score: the reply is not a chat completion ({reply!r:.120})")
    return text
