"""Settings of rewards: the names of custom reward functions, and the models that grade."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from fovea_gym.settings.base import HttpUrl, NumThreads, Seconds, Section, TokenCount

RewardPlace: TypeAlias = Literal["thread", "process"]
Rewards: TypeAlias = str | tuple[str, ...] | None
"""One reward function by name, or a list of them."""
OVERLONG = "overlong"
"""Part of the reward that `algorithm.overlong` logs; no other part may have this name."""
FROM_PYTHON = "python:"
"""Prefix of the names of objects passed from Python code."""


def reward_tuple(reward: Rewards) -> tuple[str, ...]:
    """The names of all reward functions of a setting."""
    return () if reward is None else (reward,) if isinstance(reward, str) else reward


def part_name(spec: str) -> str:
    """The name under which a reward function of a list is logged: the function's name."""
    return spec.rpartition(":")[2].rpartition(".")[2]


GradingModel: TypeAlias = Literal["judge", "reward_model"]
RewardShare: TypeAlias = Annotated[float, Field(gt=0, le=1)]


class Judge(Section):
    """A model behind an OpenAI-compatible endpoint that grades answers, given images, question, answer and true answer.

    It is used by environment.metric_weights of captions, model_reward and second_opinion.
    """

    url: Annotated[HttpUrl, Field(examples=["http://HOST:PORT/v1"])]
    """Base URL of the endpoint, including `/v1`: http://localhost:8000/v1."""
    model: str
    """Name of the model at the endpoint."""
    prompt: str | None = None
    """Prompt after the images; it must contain {answer}, and may contain {question} and {references}, the true answers.
    Default: one for descriptions in environment.metric_weights, one for answers elsewhere (docs/environments.md)."""
    max_new_tokens: TokenCount = 256
    """Maximum number of tokens of a reply."""
    max_concurrency: NumThreads = 8
    """Maximum number of concurrent calls."""
    timeout_seconds: Seconds = 60.0
    """Time limit of one try, from connecting to the last byte."""
    api_key_env: str | None = None
    """Environment variable that holds the key of the endpoint; the key itself is not a setting."""
    on_failure: Literal["error", "drop", "drop_completion"] = "error"
    """Action when all tries to grade an answer have failed. error: stop; drop: drop the group (`groups/unscored`);
    drop_completion: drop only the completion (`episodes/failed`)."""

    def contradictions(self) -> Iterator[str]:
        if self.prompt is not None and "{answer}" not in self.prompt:
            yield ".prompt has no {answer}, so there is nothing to judge; add it"


class RewardModel(Section):
    """A sequence classifier with one output, in transformers' format; only a vision-language model sees images."""

    path: str
    """Folder with the config, the tokenizer and the weights as safetensors."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the reward model."""
