"""Arguments shared by the servers of all engines, and the process that each becomes."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fovea.errors import EngineError
from fovea.rollout.outputs import check_fits
from fovea.types import Request
from fovea_gym.errors import ConfigError
from fovea_gym.rows.access import UrlLimits
from fovea_gym.utils.launch import with_this_fovea

BANNED_IDS_ENV, API_KEY_ENV, ADMIN_KEY_ENV = "FOVEA_BANNED_IDS", "FOVEA_SERVER_KEY", "FOVEA_ADMIN_KEY"
URL_LIMITS_ENV = "FOVEA_URL_LIMITS"
"""Environment variables of a server's process, for `rollout.server_guard`."""
KEYS = ("api_key", "admin_api_key")
"""Arguments of engines that are keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelServer:
    """A model to serve, and where."""

    folder: Path
    name: str
    """The model's name in requests."""
    dtype: str = "auto"
    """Type of its weights: that of its files; `auto` is the engine's choice, which may be a shorter one."""
    host: str
    port: int
    api_key: str | None = field(default=None, repr=False)
    """The key that every request must bring."""
    admin_key: str | None = field(default=None, repr=False)
    """The key of administration; None: there is none, by anybody."""
    banned_ids: Sequence[int] = ()
    """Ids that are never sampled (`models.processor.Processor`)."""
    weights_dir: Path | None = None
    """The folder through which a trainer brings its weights; None for a server of answers only."""
    url_limits: UrlLimits | None = None
    """Limits of reading the images of requests at their addresses; None: images come as data only."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the engine, under its own names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A process to start."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
    """Its environment, which may hold a key."""


def checked(server: ModelServer, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The further arguments, with underscores; ConfigError for one that is `fixed`, or a key."""
    given = {key.replace("-", "_"): value for key, value in server.arguments.items()}
    for key, value in given.items():
        if key in KEYS:
            raise ConfigError(f"{key}: other users of this machine could read it; use --api-key-env VARIABLE")
        if key in fixed:
            raise ConfigError(f"{key}={value}: `fovea serve` sets it to {fixed[key]}; remove it")
    return given


def environment(server: ModelServer, *, without: Collection[str] = ()) -> dict[str, str]:
    """This process's environment, and what the server is not told on its command line, which every user can list."""
    limits = None if server.url_limits is None else json.dumps(asdict(server.url_limits))
    own = {API_KEY_ENV: server.api_key, ADMIN_KEY_ENV: server.admin_key, URL_LIMITS_ENV: limits}
    inherited = {name: value for name, value in os.environ.items() if name not in (*own, *without)}
    given = {name: value for name, value in own.items() if value is not None}
    return with_this_fovea(inherited | given | {BANNED_IDS_ENV: json.dumps(list(server.banned_ids))})


class LaunchesServers(Protocol):
    """An engine's own way to start its server."""

    def __call__(self, server: ModelServer) -> Launch:
        """The process of this server; ConfigError for arguments that it cannot take."""
        ...


CLOSED = "the engine was closed; start another one"
NO_WEIGHTS = "the engine has no weights; run a weight sync first"
BROKEN_SYNC = (
    "the last weight sync failed halfway and left weights of two versions in the engine; sync all weights again, or "
    "start again to continue from the last checkpoint"
)


@dataclass(slots=True, kw_only=True)
class Readiness:
    """True if an engine can serve a request, and with which weights."""

    max_model_len: int
    """Most tokens of a prompt with its completion."""
    max_images: int
    """Most images of a prompt."""
    version: int | None = None
    """Version of the weights that it holds; None: it has none to draw with, for the reason in `lacks`."""
    lacks: str = NO_WEIGHTS
    asleep: bool = False

    def lose_weights(self, reason: str) -> None:
        """Refuse requests for this reason, until a version is set again."""
        self.version, self.lacks = None, reason

    def check(self, request: Request) -> None:
        """Raise EngineError for a request that cannot be served now, or at all."""
        if self.asleep:
            raise EngineError("a request reached an engine that is asleep; call wake first")
        if self.version is None:
            raise EngineError(self.lacks)
        check_fits(request, max_model_len=self.max_model_len, max_images=self.max_images)

    def check_wakes(self) -> None:
        """Raise EngineError for a wake of an engine whose weights were freed, and not synced since."""
        if self.version is None:
            raise EngineError("wake was called before the weights that sleep freed were sent; run a weight sync first")

    @property
    def sampled_with(self) -> int:
        """Version of the weights that the running requests are sampled with."""
        assert self.version is not None, "weights arrived while a request was running"
        return self.version


def check_idle(call: str, num_running: int) -> None:
    """Raise EngineError for a call that may not come while requests run."""
    if num_running:
        raise EngineError(f"{call} while the engine is generating completions; await them first")
