"""Two real servers for training, and an engine of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fovea.config.backends import VllmServersSettings
from fovea.config.model import Model
from fovea.models.tiny import TinyParts, save_tiny
from fovea.rollout.vllm.connect import connect
from fovea.rollout.vllm.servers import VllmServers
from tests.rollout.engine_suite import LIMIT_TOKENS
from tests.rollout.serve_command import KEY, KEY_ENV, Serving, serving
from tests.tiny_models import tiny


@dataclass(frozen=True)
class Site:
    """A model's folder, the folder of weight syncs, and two servers for training on them."""

    parts: TinyParts
    model: Path
    weights: Path
    servers: list[Serving]
    stack: ExitStack

    def start(self, port: int | None = None) -> Serving:
        """Start a server, which ends with the stack."""
        words = ["--api-key-env", KEY_ENV, "--for-training", str(self.weights)]
        return self.stack.enter_context(serving(self.model, *words, port=port))

    def start_again(self, number: int) -> None:
        """Kill a server, and wait for another one in its place."""
        self.servers[number].kill()
        self.servers[number] = self.start(port=int(self.servers[number].url.rpartition(":")[2]))
        self.servers[number].wait_until_ready()

    def connect(self, **settings: object) -> VllmServers:
        given = {"servers": tuple(each.url for each in self.servers), "weights_dir": str(self.weights)} | settings
        return connect(
            VllmServersSettings(**given),  # type: ignore[arg-type]
            Model(path=str(self.model), dtype="float32"),
            self.parts.processor,
            max_model_len=LIMIT_TOKENS,
        )


@contextmanager
def two_servers(folder: Path) -> Iterator[Site]:
    """Two servers of a tiny model for the block; they may not be ready yet. Their key is in this environment."""
    parts = tiny("qwen3_vl")
    save_tiny(parts, folder / "model")
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(KEY_ENV, KEY)
        made = Site(parts=parts, model=folder / "model", weights=folder / "weights", servers=[], stack=stack)
        # started together: each takes its time
        made.servers.extend(made.start() for _ in range(2))
        yield made
