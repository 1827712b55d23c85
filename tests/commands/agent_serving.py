"""A tiny model behind the endpoint of `fovea serve --for-agents`."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import openai
import uvicorn

from fovea.commands.agent_server import AgentConversations, AgentServer
from fovea.data.images import ImageOpener
from fovea.models.render import Renderer
from fovea.models.vlm import VLM
from fovea.rollout.embedded.engine import EmbeddedEngine
from tests.tiny_models import tiny

KEY = "sesame"
PARTS = tiny("qwen3_vl")


class Served:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        engine = EmbeddedEngine(VLM(PARTS.network, PARTS.processor.banned_ids), PARTS.processor, max_batch_tokens=9000)
        engine.load_weights(dict(engine.own_weights()), 7)
        renderer = Renderer(PARTS.processor, ImageOpener(max_mib=1, max_megapixels=1))
        self.conversations = AgentConversations(engine, renderer, folder, "agents")
        app = AgentServer(self.conversations, name="tiny", key=KEY, max_new_tokens=12).app()
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
        threading.Thread(target=self.server.run, daemon=True).start()
        while not self.server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}/v1"
        self.client = openai.OpenAI(base_url=self.url, api_key=KEY, max_retries=0)

    def ask(self, messages: list[Any], **settings: Any) -> Any:
        given = {"model": "tiny", "logprobs": True, "seed": 3, "max_tokens": 5}
        return self.client.chat.completions.create(messages=messages, **(given | settings))

    def turns(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "turns.jsonl").read_text().splitlines()]
