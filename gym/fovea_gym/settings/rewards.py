"""Settings of rewards: names of the user's own functions, and the models that grade."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from fovea_gym.settings.base import HttpUrl, NumThreads, Seconds, Section, TokenCount

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


GradingModel: TypeAlias = Literal["judge", "reward_model"]
RewardShare: TypeAlias = Annotated[float, Field(gt=0, le=1)]


class Judge(Section):
    """A model that grades answers, behind any OpenAI-compatible endpoint, given images, question, answer and truth.

    environment.metric_weights of captions, model_reward and second_opinion ask it.
    """

    url: Annotated[HttpUrl, Field(examples=["http://HOST:PORT/v1"])]
    """Base of the endpoint, `/v1` included: http://localhost:8000/v1."""
    model: str
    """Name of the model there."""
    prompt: str | None = None
    """Prompt after the images; holds {answer}, and optionally {question} and {references}, the true answers. Default:
    one for descriptions in environment.metric_weights, one for answers elsewhere (docs/environments.md)."""
    max_new_tokens: TokenCount = 256
    """Longest reply, in tokens."""
    max_concurrency: NumThreads = 8
    """Concurrent calls."""
    timeout_seconds: Seconds = 60.0
    """Time limit of one try, from connecting to the last byte."""
    api_key_env: str | None = None
    """Environment variable that holds the key of the endpoint; the key itself is not a setting."""
    on_failure: Literal["error", "drop", "drop_completion"] = "error"
    """Handling of a grade that all tries failed to get: stop, or drop the group (`groups/unscored`) or only the
    completion (`episodes/failed`)."""

    def contradictions(self) -> Iterator[str]:
        if self.prompt is not None and "{answer}" not in self.prompt:
            yield ".prompt has no {answer}, so that there is nothing to judge; put it in"


class RewardModel(Section):
    """A sequence classifier with one output in transformers' format; only a vision-language model sees images."""

    path: str
    """Folder with config, tokenizer and weights as safetensors."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the reward model."""
