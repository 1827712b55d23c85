"""Metrics of episodes of several turns: lengths, entropies and rewards by turn, calls of tools, seconds of replies."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from fovea.types import Episode, Metrics, SampledTurn
from fovea_gym.types import Message

NUMBERED_TURNS = 9
"""Number of turns with separate metrics; later turns share those of `10+`, so that the number of names is limited."""
NAMED_TOOLS = 20
"""Number of tools with a metric in a step, the most called first; calls of the others are counted together."""
OTHER_TOOLS = "other"
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def turn_metrics(episodes: Sequence[Episode]) -> Metrics:
    """Metrics of the turns in a step's episodes, some of which have several turns."""
    numbers = [len(episode.turns) for episode in episodes]
    replies = [turn for episode in episodes for turn in episode.turns[1:]]
    messages = [message for turn in replies for message in turn.messages]
    unread = [message.failed for message in messages if message.role != "tool"]
    return {
        "turns/mean": _mean(numbers),
        "turns/max": float(max(numbers)),
        "turns/limit_frac": _mean([episode.end == "max_turns" for episode in episodes]),
        "turns/token_limit_frac": _mean([episode.end == "max_tokens" for episode in episodes]),
        "seconds/reply_max": max(turn.seconds for turn in replies),
        **({"turns/unread_frac": _mean(unread)} if unread else {}),
        **_by_number(episodes),
        **_of_tools(messages, len(episodes)),
    }


def _by_number(episodes: Sequence[Episode]) -> Metrics:
    """Means over the first turns of all episodes, over the second turns, and so on."""
    values: dict[str, list[float]] = defaultdict(list)
    entropies: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for number, turn in enumerate(episode.turns, start=1):
            name = str(number) if number <= NUMBERED_TURNS else f"{NUMBERED_TURNS + 1}+"
            surprisals_T = (-turn.tokens.completion.logprobs_T).tolist() if isinstance(turn, SampledTurn) else []
            values[f"turns/{name}/tokens"].append(len(surprisals_T))
            entropies[f"turns/{name}/entropy"] += surprisals_T
            if episode.score.turns:
                values[f"turns/{name}/reward"].append(episode.score.turns[number - 1])
    return {key: _mean(of_key) for key, of_key in (values | entropies).items() if of_key}


def _of_tools(messages: Sequence[Message], num_episodes: int) -> Metrics:
    """Successful calls per episode of each tool, and the share of all calls that failed; no metrics without calls."""
    results = [message for message in messages if message.role == "tool"]
    if not results:
        return {}
    # only successful calls: failed ones may have any name, since a model wrote it
    calls = Counter(message.tool for message in results if not message.failed)
    most_first = sorted(filter(_TOOL_NAME.fullmatch, calls), key=lambda tool: (-calls[tool], tool))
    named = {tool: calls[tool] for tool in most_first[:NAMED_TOOLS]}
    rest = calls.total() - sum(named.values())
    named |= {OTHER_TOOLS: named.get(OTHER_TOOLS, 0) + rest} if rest else {}
    by_tool = {f"tools/calls/{tool}": count / num_episodes for tool, count in named.items()}
    return by_tool | {"tools/failed_frac": _mean([message.failed for message in results])}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
