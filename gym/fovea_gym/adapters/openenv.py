"""Environments on an OpenEnv server, over OpenEnv's published protocol of JSON messages on a WebSocket.

An episode is one connection, for which the server keeps one environment (OpenEnv's `/reset` and `/step` over HTTP keep
no state between calls). The package `openenv` is not used: it brings a web framework and version pins that conflict
with Fovea's. A row is a seed: the prompt shows the observation of `reset`. If the `reset` of an episode returns another
observation, the episode fails, since the prompt would show the wrong state.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from fovea_gym.adapters.own_score import FIRST_SEED, ScoredBySession
from fovea_gym.environments.base import Environment, Session, Split
from fovea_gym.errors import ConfigError, DataError, MissingExtraError, first_line
from fovea_gym.graders.base import NoScoreError
from fovea_gym.rows.tasks import LazyTasks
from fovea_gym.settings.environments import OpenEnvEnvironment
from fovea_gym.types import ImageRef, Message, Score, Task, Turn
from fovea_gym.utils.event_loop import wait_for, warning_if_slow
from fovea_gym.utils.installing import pip_install

try:
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import WebSocketException
except ImportError as error:
    raise MissingExtraError(
        f"the environment openenv needs the package websockets; {pip_install('openenv')}"
    ) from error

Observed: TypeAlias = Mapping[str, Any]
"""The data of an observation message: `observation`, `reward` and `done`."""
MAX_MESSAGE_BYTES = 64 << 20
"""A screenshot of 1920 x 1080 as nested lists of numbers takes up to 31 MB."""
MAX_TEXT_CHARACTERS = 20_000
MAX_PICTURES = 8
"""Most pictures of one field."""
RESET_SECONDS = 120
"""Time limit for the observation that a prompt shows; replies have the deadline of `environment.session`."""
# an unclosed tag matches up to the end of the text, so that the search takes linear time
_TAG = re.compile(r"<action>(.*?)(</action>|\Z)", re.DOTALL | re.IGNORECASE)
_PICTURE_URL = re.compile(r"data:image/[\w.+-]+;base64,")


class OpenEnv(Environment):
    """The environment `openenv`, whose settings are `OpenEnvEnvironment`."""

    graders = (ScoredBySession("openenv"),)
    has_demonstrations = False

    def __init__(self, config: OpenEnvEnvironment, section: str = "") -> None:
        """Reset the environment once, to check it; ConfigError if no server answers or its observation lacks a key.

        `section` is the prefix of setting names in errors.
        """
        self._config = config
        self._section = section
        self.max_turns = config.max_turns
        try:
            self._first(FIRST_SEED["train"])
        except NoScoreError as error:
            raise ConfigError(
                f"{section}url={config.url} {error}; start the server, or correct the settings"
            ) from error

    def tasks(self, split: Split) -> Sequence[Task]:
        sizes = {"train": self._config.train_size, "dev": self._config.dev_size, "test": self._config.test_size}
        return LazyTasks(lambda row: self._task(split, row), range(sizes[split]), kind_of=lambda _: "all")

    def prompt(self, task: Task) -> Sequence[Message]:
        return (Message(role="user", parts=(*task.images, task.question)),)

    def target(self, task: Task) -> str:
        """The tags of an answer, left empty: nobody knows which actions succeed."""
        return "<action></action>"

    async def open(self, task: Task, seed: int) -> OpenEnvSession:
        """Begin the episode of a row; NoScoreError if the server fails or the observation is not the prompt's."""
        row = task.row["seed"]
        assert isinstance(row, int), task.id
        server = await _Server.connected(self._config.url)
        try:
            first = parts_of(await server.ask("reset", self._reset(row)), self._config)
            if _digest(first) != task.row["shown"]:
                raise NoScoreError(
                    f"at {self._config.url} resets seed {row} to another observation than before, so the prompt "
                    "would show another state; use an environment that follows its seed, or remove the key that "
                    f"differs from {self._section}text_keys or image_keys"
                )
        except BaseException:
            await server.close()
            raise
        return OpenEnvSession(server, self._config)

    def _task(self, split: Split, row: int) -> Task:
        seed = FIRST_SEED[split] + row
        try:
            parts = self._first(seed)
        except NoScoreError as error:
            raise DataError(
                f"{split}/{row}: {self._section}url={self._config.url} {error}; restart the server"
            ) from error
        texts = [part for part in parts if isinstance(part, str)]
        images = tuple(part for part in parts if isinstance(part, ImageRef))
        question = "\n".join([*texts, self._config.prompt])
        shown = {"seed": seed, "shown": _digest(parts)}
        return Task(id=f"{split}/{row}", question=question, answer="", images=images, row=shown)

    def _first(self, seed: int) -> tuple[str | ImageRef, ...]:
        async def observed() -> Observed:
            server = await _Server.connected(self._config.url)
            try:
                with warning_if_slow(f"{self._section}url={self._config.url} has not answered reset", RESET_SECONDS):
                    async with asyncio.timeout(RESET_SECONDS):
                        return await server.ask("reset", self._reset(seed))
            except TimeoutError:
                raise NoScoreError(f"gave no answer to reset within {RESET_SECONDS} seconds") from None
            finally:
                await server.close()

        return parts_of(wait_for(observed()), self._config)

    def _reset(self, seed: int) -> dict[str, Any]:
        return {**self._config.reset, "seed": seed}


class OpenEnvSession(Session):
    """One episode on the server, scored by the rewards of its steps."""

    def __init__(self, server: _Server, config: OpenEnvEnvironment) -> None:
        self._server = server
        self._config = config
        self._rewards: list[float] = []
        self._is_over = False

    async def reply(self, turns: Sequence[Turn]) -> Sequence[Message] | None:
        """The observation after the action of the last turn; None once the server reports that the episode is done."""
        return await self._played(turns[-1].text) or None

    async def score(self, turns: Sequence[Turn]) -> Score:
        """The sum of the rewards of all turns; the accuracy is 1 if the episode is done with a last reward above 0."""
        if not self._is_over and len(turns) > len(self._rewards):  # the last turn before the limit gets no reply
            await self._played(turns[-1].text)
        has_succeeded = self._is_over and self._rewards[-1] > 0
        return Score(reward=sum(self._rewards), accuracy=float(has_succeeded), turns=tuple(self._rewards))

    async def close(self) -> None:
        """Close the connection; the server then closes the environment."""
        await self._server.close()

    async def _played(self, text: str) -> tuple[Message, ...]:
        action = action_in(text, self._config.action_key)
        if action is None:
            self._rewards.append(0.0)
            how = "Answer with a JSON object of the action, as <action>{...}</action>."
            return (Message(role="user", parts=(f"No action was read. {how}",), failed=True),)
        observed = await self._server.ask("step", action)
        reward = observed.get("reward") or 0.0
        if not isinstance(reward, int | float) or not abs(reward) <= sys.float_info.max:
            raise NoScoreError(f"at {self._config.url} sent the reward {reward!r:.60}, which is not a finite number")
        self._rewards.append(float(reward))
        self._is_over = bool(observed.get("done"))
        return () if self._is_over else (Message(role="user", parts=parts_of(observed, self._config)),)


class _Server:
    """A connection to the server; the text of its NoScoreErrors continues a sentence after the environment's name."""

    def __init__(self, connection: ClientConnection, url: str) -> None:
        self._connection = connection
        self._url = url

    @staticmethod
    async def connected(url: str) -> _Server:
        address = f"ws{url.removeprefix('http').rstrip('/')}/ws"
        try:
            # ignore proxies: a proxy would connect to its own localhost
            return _Server(await connect(address, max_size=MAX_MESSAGE_BYTES, proxy=None), url)
        except (OSError, WebSocketException) as error:
            raise NoScoreError(f"cannot be reached at {address} ({first_line(error)})") from error

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Observed:
        """Send a message and return the observation that answers it."""
        try:
            await self._connection.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self._connection.recv())
        except (OSError, WebSocketException, ValueError, RecursionError) as error:
            raise NoScoreError(f"at {self._url} gave no answer to {kind} ({first_line(error)})") from error
        match answer:
            case {"type": "observation", "data": {"observation": {}}}:
                observed: Observed = answer["data"]
                return observed
            case {"type": "error", "data": {"message": message}}:
                raise NoScoreError(f"at {self._url} refuses {kind}: {' '.join(str(message).split())[:200]}")
        raise NoScoreError(f"at {self._url} answers {kind} with {json.dumps(answer)[:60]}, which is not an observation")

    async def close(self) -> None:
        await self._connection.close()


def action_in(text: str, action_key: str | None) -> dict[str, Any] | None:
    """The action in the last `<action>` tag of a text, or in the whole text without tags.

    The content is the value of `action_key` or, if that is None, a JSON object; None if it is not an object.
    """
    tags = [content for content, closing in _TAG.findall(text) if closing]
    content = (tags[-1] if tags else text).strip()
    if action_key is not None:
        return {action_key: content}
    try:
        action = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return action if isinstance(action, dict) else None


def parts_of(observed: Observed, config: OpenEnvEnvironment) -> tuple[str | ImageRef, ...]:
    """The texts and pictures of an observation under the keys in the settings; NoScoreError if a key is missing.

    A key whose value is null, such as a screenshot that was not taken, is left out.
    """
    observation = observed["observation"]
    for key in (*config.image_keys, *config.text_keys):
        if key not in observation:
            raise NoScoreError(
                f"returned an observation with {', '.join(map(str, observation))}, without {key}; correct its settings"
            )
    parts: list[str | ImageRef] = []
    for key in config.image_keys:
        if observation[key] is not None:
            parts += _pictures(observation[key], observation.get(f"{key}_shape"), key)
    for key in config.text_keys:
        value = observation[key]
        if value is not None:
            parts.append((value if isinstance(value, str) else f"{key}: {json.dumps(value)}")[:MAX_TEXT_CHARACTERS])
    return tuple(parts)


def _pictures(value: Any, shape: Any, key: str) -> list[ImageRef]:
    """The pictures of a field: base64 text (one, a list, or a data URI), or pixel values in nested or flat lists."""
    where = f"the field {key} of an observation"
    try:
        if isinstance(value, str):
            return [_decoded(value, where)]
        if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
            if len(value) > MAX_PICTURES:
                raise ValueError(f"{len(value)} pictures, more than {MAX_PICTURES}")
            return [_decoded(each, where) for each in value]
        pixels = np.asarray(value)
        if shape is not None:
            pixels = pixels.reshape(shape)
        if pixels.ndim == 2:
            pixels = np.repeat(pixels[..., None], 3, axis=2)
        if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype.kind not in "iu" or not _are_bytes(pixels):
            raise ValueError(f"values of shape {pixels.shape} and type {pixels.dtype}")
    except (ValueError, TypeError) as error:
        raise NoScoreError(
            f"returned no picture in {key} ({first_line(error)}); give base64, or values from 0 to 255 as "
            f"[height, width, 3], [height, width], or a flat list together with {key}_shape"
        ) from error
    return [ImageRef(source=pixels.astype(np.uint8), where=where)]


def _decoded(text: str, where: str) -> ImageRef:
    return ImageRef(source=base64.b64decode(_PICTURE_URL.sub("", text, count=1), validate=True), where=where)


def _are_bytes(values: np.ndarray[Any, Any]) -> bool:
    return bool(values.size) and int(values.min()) >= 0 and int(values.max()) <= 255


def _digest(parts: Sequence[str | ImageRef]) -> str:
    """A hash of texts and pictures."""
    digest = hashlib.sha256()
    for part in parts:
        source = part.source if isinstance(part, ImageRef) else part
        digest.update(source.tobytes() if isinstance(source, np.ndarray) else repr(source).encode())
    return digest.hexdigest()
