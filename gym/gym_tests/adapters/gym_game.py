"""Environments of gymnasium as a user writes them."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Walk(gymnasium.Env[int, int]):
    """A walk along a strip of cells, from one that the seed chooses to the last; wind may blow one step back."""

    def __init__(self, length: int = 6, wind: float = 0.0) -> None:
        self.action_space, self.observation_space = Discrete(2, start=1), Discrete(length)
        self.length, self.wind, self.at = length, wind, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(0, self.length - 2))
        return self.at, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        blown = self.np_random.random() < self.wind
        self.at = max(0, self.at + (1 if action == 2 else -1) - int(blown))
        is_there = self.at == self.length - 1
        return self.at, 1.0 if is_there else -0.1, is_there, False, {"won": is_there}

    def render(self) -> Any:
        strip = np.zeros((16, 16 * self.length, 3), np.uint8)
        strip[:, 16 * self.at : 16 * (self.at + 1)] = 255
        return strip


class Continuous(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = Box(0, 1)  # type: ignore[assignment]


class Unseen(Walk):
    def render(self) -> Any:
        return None


class Broken(Walk):
    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        raise RuntimeError("the motor is stuck")


class Plain:
    pass
