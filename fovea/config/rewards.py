"""Checks of the user's own reward functions, as `reward`, `reward_weights` and `reward_in` describe them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


def list_complaints(reward: Rewards, weights: Sequence[float] | None) -> Iterator[str]:
    """Complaints about a list of rewards and its weights."""
    specs = reward_tuple(reward)
    if weights is not None and (isinstance(reward, str) or len(weights) != len(specs)):
        given = f"reward={reward} is one function" if isinstance(reward, str) else f"reward has {len(specs)} functions"
        yield (
            f"reward_weights={list(weights)} has a number for each function of a list, but {given}; give as many, or "
            "leave reward_weights out"
        )
    if reward is None or isinstance(reward, str):
        return
    names = [part_name(spec) for spec in reward]
    if not names:
        yield "reward=[] names no function; name one or more, or leave reward out"
    if OVERLONG in names:
        yield (
            f"reward={list(reward)}: the metric reward/{OVERLONG} is the penalty of algorithm.{OVERLONG}; rename the "
            f"function {OVERLONG}"
        )
    for name in dict.fromkeys(names):
        if names.count(name) > 1 or not name.isidentifier():
            yield (
                f"reward={list(reward)} lists functions that are logged as reward/NAME, and {name} names "
                f"{names.count(name)} of them; write each as a def with a name that no other has"
            )


def process_complaints(rewards: Mapping[str, Sequence[str]], place: RewardPlace) -> Iterator[str]:
    """Complaints about functions that no other process can import."""
    if place == "thread":
        return
    if not rewards:
        yield (
            "reward_in=process is about reward functions in files, and none is set; set reward=path/to/file.py:name, "
            "or leave reward_in out"
        )
    for key, specs in rewards.items():
        for spec in specs:
            if spec.startswith(FROM_PYTHON):
                yield (
                    f"reward_in=process imports {key} in its own processes, but {key}={spec} is an object of this "
                    f"process; write it into a file, {key}='path/to/file.py:{part_name(spec)}', or leave reward_in out"
                )
