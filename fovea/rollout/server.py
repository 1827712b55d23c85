"""Settings and processes of the servers of all engines, and checks that an engine is ready for a request."""

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
"""Environment variables of a server's process, which `rollout.server_guard` reads."""
KEYS = ("api_key", "admin_api_key")
"""Engine arguments that hold a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelServer:
    """A model to serve, and the address and access rules of its server."""

    folder: Path
    name: str
    """The model's name in requests."""
    dtype: str = "auto"
    """Dtype of the weights in the model's files; `auto` lets the engine choose one, possibly with fewer bits."""
    host: str
    port: int
    api_key: str | None = field(default=None, repr=False)
    """API key that every request must carry; None: no key is needed."""
    admin_key: str | None = field(default=None, repr=False)
    """Key for the administration paths; None: nobody may call them."""
    banned_ids: Sequence[int] = ()
    """Ids that are never sampled (`models.processor.Processor`)."""
    weights_dir: Path | None = None
    """Folder through which a trainer sends its weights; None for a server that is not used for training."""
    url_limits: UrlLimits | None = None
    """Limits for fetching images that requests give by address; None: requests must contain the image data."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further engine arguments, under the engine's own names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The command and environment of a process to start."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
    """Environment variables of the process; one of them may be a key."""


def checked(server: ModelServer, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the further engine arguments, with underscores; ConfigError for a `fixed` argument or a key."""
    given = {key.replace("-", "_"): value for key, value in server.arguments.items()}
    for key, value in given.items():
        if key in KEYS:
            raise ConfigError(f"{key}: other users of this machine could read it; use --api-key-env VARIABLE")
        if key in fixed:
            raise ConfigError(f"{key}={value}: `fovea serve` sets it to {fixed[key]}; remove it")
    return given


def environment(server: ModelServer, *, without: Collection[str] = ()) -> dict[str, str]:
    """Environment of the server: this process's variables, and values that must not appear on the command line.

    Every user of the machine can list command lines.
    """
    limits = None if server.url_limits is None else json.dumps(asdict(server.url_limits))
    own = {API_KEY_ENV: server.api_key, ADMIN_KEY_ENV: server.admin_key, URL_LIMITS_ENV: limits}
    inherited = {name: value for name, value in os.environ.items() if name not in (*own, *without)}
    given = {name: value for name, value in own.items() if value is not None}
    return with_this_fovea(inherited | given | {BANNED_IDS_ENV: json.dumps(list(server.banned_ids))})


class LaunchesServers(Protocol):
    """A function that builds the command to start an engine's server."""

    def __call__(self, server: ModelServer) -> Launch:
        """Return the process to start for this server; ConfigError for arguments that the engine does not accept."""
        ...


CLOSED = "the engine was closed; start another one"
NO_WEIGHTS = "the engine has no weights; run a weight sync first"
BROKEN_SYNC = (
    "the last weight sync failed halfway and left weights of two versions in the engine; sync all weights again, or "
    "start again to continue from the last checkpoint"
)


@dataclass(slots=True, kw_only=True)
class Readiness:
    """State that decides if an engine can serve a request: its limits, its weights, and if it is asleep."""

    max_model_len: int
    """Maximum number of tokens of a prompt with its completion."""
    max_images: int
    """Maximum number of images of a prompt."""
    version: int | None = None
    """Version of the engine's weights; None: it has no usable weights, for the reason in `lacks`."""
    lacks: str = NO_WEIGHTS
    asleep: bool = False

    def lose_weights(self, reason: str) -> None:
        """Refuse requests with this reason until a version is set again."""
        self.version, self.lacks = None, reason

    def check(self, request: Request) -> None:
        """Raise EngineError if the request cannot be served, now or ever."""
        if self.asleep:
            raise EngineError("a request reached an engine that is asleep; call wake first")
        if self.version is None:
            raise EngineError(self.lacks)
        check_fits(request, max_model_len=self.max_model_len, max_images=self.max_images)

    def check_wakes(self) -> None:
        """Raise EngineError if the engine's weights were freed and no weight sync has followed."""
        if self.version is None:
            raise EngineError("wake was called before the weights that sleep freed were sent; run a weight sync first")

    @property
    def sampled_with(self) -> int:
        """Version of the weights with which the running requests are sampled."""
        assert self.version is not None, "weights arrived while a request was running"
        return self.version


def check_idle(call: str, num_running: int) -> None:
    """Raise EngineError if requests are running during a call that does not allow it."""
    if num_running:
        raise EngineError(f"{call} while the engine is generating completions; await them first")
