"""Sampling parameters of training and of evaluation, from the settings of a run and its environment."""

from __future__ import annotations

from dataclasses import replace

from fovea.config.run import Config
from fovea.types import Sampling
from fovea_gym.environments.base import Environment
from fovea_gym.errors import ConfigError
from fovea_gym.types import AnswerEnd


def training_sampling(config: Config, environment: Environment) -> Sampling:
    """Sampling parameters of training rollouts; each request gets a separate seed."""
    return replace(rollout_sampling(config, environment), exact=False)


def evaluation_sampling(config: Config, environment: Environment) -> Sampling:
    """Sampling parameters of sampled answers to held-out rows: set in `evaluate`, else taken from `rollout`."""
    of_rollout, evaluate = rollout_sampling(config, environment), config.evaluate
    temperature = of_rollout.temperature if evaluate.temperature is None else evaluate.temperature
    top_p = of_rollout.top_p if evaluate.top_p is None else evaluate.top_p
    return replace(of_rollout, temperature=temperature, top_p=top_p)


def rollout_sampling(config: Config, environment: Environment) -> Sampling:
    """Sampling parameters from the settings of `rollout`, including where answers end."""
    rollout = config.rollout
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=rollout.stop,
        answer_end=answer_end_of(config, environment),
    )


def answer_end_of(config: Config, environment: Environment) -> AnswerEnd | None:
    """The end of an answer, if completions stop there (`rollout.stop_after_answer`); ConfigError if none is defined."""
    if not config.rollout.stop_after_answer:
        return None
    end = environment.answer_end
    if end is None:
        raise ConfigError(
            f"rollout.stop_after_answer=true, but environment={config.environment.name} does not say where an answer "
            "ends, or the parts of a mixture name different ends; set rollout.stop_after_answer=false, or define "
            "answer_end = AnswerEnd() (from fovea_gym.types) in your environment"
        )
    return end
