"""An OpenEnv server, with the real package `openenv` where it is installed: `openenv_server.py PORT`."""

from __future__ import annotations

import base64
import io
import sys
from typing import Any

import numpy as np
import uvicorn
from PIL import Image

try:
    from openenv.core.env_server import Action, Environment, Observation, State, create_app
except ImportError:
    from openenv_stand_in import Action, Environment, Observation, State, create_app


class Move(Action):
    direction: str


class Seen(Observation):
    text: str
    encoded: str | None
    listed: list[str]
    nested: list[list[list[int]]]
    flat: list[int]
    flat_shape: list[int]
    step_id: float


class Corridor(Environment[Move, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.at, self.num_steps = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, length: int = 4, **_: Any) -> Seen:
        self.length, self.num_steps = length, 0
        self.at = int(np.random.default_rng(seed).integers(0, length - 1))
        return self.seen(None)

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Seen:
        if action.direction not in ("left", "right"):
            raise ValueError(f"there is no way {action.direction}")
        self.num_steps += 1
        self.at = max(0, self.at + (1 if action.direction == "right" else -1))
        return self.seen(1.0 if self.at == self.length - 1 else -0.25)

    def seen(self, reward: float | None) -> Seen:
        pixels = np.zeros((8, 8 * self.length, 3), np.uint8)
        pixels[:, 8 * self.at : 8 * (self.at + 1)] = 200
        content = io.BytesIO()
        Image.fromarray(pixels).save(content, "PNG")
        encoded = base64.b64encode(content.getvalue()).decode()
        return Seen(
            text=f"cell {self.at} of {self.length}",
            encoded=encoded,
            listed=[encoded, f"data:image/png;base64,{encoded}"],
            nested=pixels.tolist(),
            flat=pixels[:, :, 0].flatten().tolist(),
            flat_shape=[8, 8 * self.length],
            step_id=float(np.random.default_rng().random()),
            reward=reward,
            done=reward is not None and reward > 0,
        )

    @property
    def state(self) -> State:
        return State(step_count=self.num_steps)


if __name__ == "__main__":
    app = create_app(Corridor, Move, Seen, max_concurrent_envs=8)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
