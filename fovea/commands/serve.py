"""`fovea serve`: start a server for a run, a checkpoint or a model folder."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import Any, NoReturn

import httpx2
from transformers import AutoConfig

from fovea.commands.exporting.export import export, step_of
from fovea.commands.targets import CheckpointTarget, ModelTarget, parse_target
from fovea.config.model import Model
from fovea.errors import EngineError
from fovea.models.processor import load_processor
from fovea.rollout.server import Launch, LaunchesServers, ModelServer
from fovea.rollout.server_guard import made_key
from fovea.wiring.model_trial import try_model
from fovea_gym.errors import ConfigError
from fovea_gym.processes.child import ChildProcess
from fovea_gym.rows.access import UrlLimits
from fovea_gym.utils.addresses import is_loopback
from fovea_gym.utils.bounded import check_inside

EXPORTS = "exports"
"""Folder of a run for the exports that are served."""


def served_folder(source: str, say: Callable[[str], None], *, trust: bool = False) -> Path:
    """The folder of a model, or the export of a run's newest or a given checkpoint; ConfigError for another source."""
    target = parse_target(source)
    if isinstance(target, CheckpointTarget):
        folder = target.run / EXPORTS / f"step-{step_of(target)}"
        check_inside(folder, target.run)
        # a run that was trained again has another checkpoint at this step
        if folder.exists() and folder.stat().st_mtime < target.folder.stat().st_mtime:
            shutil.rmtree(folder)
        if not folder.exists():
            say(f"exporting {target.name} to {folder}")
            export(target.folder, folder, trust=trust)
        return folder
    if isinstance(target, ModelTarget) and target.adapter is not None:
        raise ConfigError(f"{source}: an adapter without its model; serve the run, or export without --adapter-only")
    if isinstance(target, ModelTarget) and Path(target.path).is_dir():
        return Path(target.path)
    raise ConfigError(f"{source}: not a folder; serve a run, a checkpoint, or the folder of a model (fovea export)")


ENDING_SECONDS = 20.0
POLL_SECONDS = 0.2


@contextmanager
def running(launch: Launch, ending_seconds: float = ENDING_SECONDS) -> Iterator[ChildProcess]:
    """A process for the block, which ends with all that it has started, even if this process gets SIGTERM or SIGKILL.

    It has `ending_seconds` to finish its work; if this process is killed, it has time to delete its shared memory.
    """
    # SIGTERM and SIGHUP end the block in the same way as Ctrl-C
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        process = ChildProcess(launch.command, launch.environment, grace_seconds=ENDING_SECONDS)
        try:
            yield process
        finally:
            process.terminate(ending_seconds)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_until_healthy(process: ChildProcess, url: str, max_seconds: float) -> None:
    """Return when the server at `url` answers; EngineError if it ends before that, or takes too long."""
    deadline = monotonic() + max_seconds
    while process.exit_code is None:
        with suppress(httpx2.HTTPError):
            if httpx2.get(f"{url}/health", timeout=2.0, trust_env=False).status_code == httpx2.codes.OK:
                return
        if monotonic() > deadline:
            raise EngineError(f"the server does not answer after {max_seconds:g} s; raise --start-seconds")
        sleep(POLL_SECONDS)
    raise EngineError(f"the server ended with code {process.exit_code} before it answered; its own messages say why")


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(signal.strsignal(number))


Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Address of a server, and its access key."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_env: str | None = None
    """Environment variable with the key that requests must send."""

    @property
    def url(self) -> str:
        """The address for calls from this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def api_key(self, default: str | None = None) -> str | None:
        """The key, or `default`; ConfigError if the variable is empty, or other machines could call without a key."""
        if self.api_key_env is None:
            if default is None and not is_loopback(self.host):
                raise ConfigError(
                    f"--host {self.host}: other machines can reach the server, and anyone there could use it; add "
                    "--api-key-env VARIABLE with the name of an environment variable that holds a key"
                )
            return default
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise ConfigError(f"--api-key-env {self.api_key_env}: this environment variable is not set; export it")
        return key

    def check_free(self) -> None:
        """ConfigError if the port is in use, or if the host is not an address of this machine."""
        try:
            family, _, _, _, place = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family) as listening:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind(place)
        except OSError as error:
            raise ConfigError(
                f"--host {self.host} --port {self.port}: cannot listen there ({error.strerror}); give another port"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model to serve."""

    source: str
    """A run, a checkpoint, or the folder of a model."""
    name: str | None = None
    """The model's name in requests; default: the name of its folder or run."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the engine, under the engine's names for them."""
    weights_dir: Path | None = None
    """The folder through which a trainer sends its weights; None for a server that only answers."""
    url_limits: UrlLimits | None = None
    """Limits for reading images of requests from URLs; None: images come only as data."""
    trust: bool = False


def serve(
    served: ServedModel, address: ServerAddress, launch: LaunchesServers, say: Say, *, start_seconds: float
) -> None:
    """Start the server, print how to call it, and wait until it ends; EngineError if it ends unasked."""
    # the trainer reads this key from the same folder
    admin_key = None if served.weights_dir is None else made_key(served.weights_dir)
    api_key = address.api_key(admin_key)
    address.check_free()
    folder = served_folder(served.source, say, trust=served.trust)
    model = Model(path=str(folder))
    try_model(model)
    banned_ids = load_processor(model).banned_ids
    server = ModelServer(
        folder=folder,
        name=served.name or Path(served.source).resolve().name,
        dtype=_dtype(folder),
        host=address.host,
        port=address.port,
        api_key=api_key,
        admin_key=admin_key,
        banned_ids=banned_ids,
        weights_dir=served.weights_dir,
        url_limits=served.url_limits,
        arguments=served.arguments,
    )
    process = launch(server)
    say(f"starting a server on {folder}")
    with running(process) as child:
        wait_until_healthy(child, address.url, start_seconds)
        say(f"{server.name} is served at {address.url}/v1; Ctrl-C ends it. {_next(server, address)}")
        code = child.wait()
    raise EngineError(f"the server ended unexpectedly with code {code}; its own messages say why")


def _dtype(folder: Path) -> str:
    """The dtype in a model folder's config, such as float32; `auto` if there is none."""
    dtype = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True).dtype
    return "auto" if dtype is None else str(dtype).removeprefix("torch.")


def _next(server: ModelServer, address: ServerAddress) -> str:
    """Describe how to use a server that is ready."""
    if server.weights_dir is None:
        return f"Ask it:\n{example(address, server.name)}"
    return (
        f"Train with it:\nfovea train RECIPE rollout.engine=vllm_servers 'rollout.engine.servers=[{address.url}]' "
        f"rollout.engine.weights_dir={server.weights_dir}"
    )


def example(address: ServerAddress, name: str) -> str:
    """A command that asks the server about an image."""
    key = f' -H "Authorization: Bearer ${address.api_key_env}"' if address.api_key_env else ""
    return (
        f"curl {address.url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{{\n"
        f'  "model": "{name}", "max_tokens": 256, "messages": [{{"role": "user", "content": [\n'
        """    {"type": "image_url", "image_url": {"url": "data:image/png;base64,'$(base64 -w0 image.png)'"}},\n"""
        """    {"type": "text", "text": "What is in the image?"}]}]}'"""
    )
