"""The end of an answer, at which completions stop with `rollout.stop_after_answer`."""

from __future__ import annotations

from fovea.config.run import Config
from fovea.environments.base import Environment
from fovea.environments.graders.math_answer import box_end
from fovea.errors import ConfigError
from fovea.types import AnswerEnd


def answer_end_of(config: Config, environment: Environment) -> AnswerEnd | None:
    """The end at which completions stop; None without `rollout.stop_after_answer`.

    ConfigError where the environment does not say where its answers end.
    """
    if not config.rollout.stop_after_answer:
        return None
    end = declared_end(environment)
    if end is None:
        raise ConfigError(
            f"rollout.stop_after_answer=true, but environment={config.environment.name} does not say where an answer "
            "ends, or the parts of a mixture say different ends; set rollout.stop_after_answer=false, or give an "
            "environment of your own answer_end = AnswerEnd(), of fovea.types"
        )
    return end


def declared_end(environment: Environment) -> AnswerEnd | None:
    """The `answer_end` of an environment; one of the user's need not derive from the protocol, and may lack it."""
    end: AnswerEnd | None = getattr(environment, "answer_end", None)
    return end


def find_answer_end(text: str, end: AnswerEnd) -> int | None:
    """Index of the character after the answer; None while it has not ended."""
    start = _after(text, end.after)
    if start is None:
        return None
    found = _after(text[start:], end.closing) if end.closing else box_end(text[start:])
    return None if found is None else start + found


def _after(text: str, mark: str) -> int | None:
    place = text.find(mark)
    return None if place < 0 else place + len(mark)
