"""Names of the user's own reward functions, as `reward` describes them."""

from __future__ import annotations

from typing import Literal, TypeAlias

RewardPlace: TypeAlias = Literal["thread", "process"]
Rewards: TypeAlias = str | tuple[str, ...] | None
"""One reward function by name, or a list of them."""
OVERLONG = "overlong"
"""Part of the reward that `algorithm.overlong` logs, so that no other has the name."""
FROM_PYTHON = "python:"
"""Beginning of the names of objects that Python code has given."""


def reward_tuple(reward: Rewards) -> tuple[str, ...]:
    """The names of all reward functions of a setting."""
    return () if reward is None else (reward,) if isinstance(reward, str) else reward


def part_name(spec: str) -> str:
    """The name under which a reward of a list is logged: that of its function."""
    return spec.rpartition(":")[2].rpartition(".")[2]
