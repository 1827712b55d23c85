"""The inputs of the workflows: typed records whose errors name the wrong input, and suggest the nearest name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import Field, ValidationError

from fovea.config.describe import describe
from fovea.config.recipes import CLOSE_ENOUGH
from fovea.errors import ModelError
from fovea_gym.errors import ConfigError, DataError, MissingExtraError
from fovea_gym.settings.base import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    check_depth,
)
from fovea_gym.settings.type_text import hint, show, type_text
from fovea_tools.importer.elsewhere import systems

EnvironmentName: TypeAlias = Literal["geospot", "vqa", "visual_qa"]
RECIPES: Mapping[str, str] = {"geospot": "vlm_gym_geospot", "vqa": "vlm_gym_vqa", "visual_qa": "vlm_gym_vqa"}
"""The recipe that a workflow starts from, for each `env_name`."""
DEFAULT_ENVIRONMENT = "geospot"
ABOUT_ROWS: Mapping[str, str] = {"curriculum.level_weights": "env_dataset"}
"""Recipe settings whose errors are about an input's rows: visual QA's curriculum names types of questions."""

Inputs = TypeVar("Inputs", bound=Section)


class TrainingInputs(Section):
    """The inputs of vlm-rl-training. An omitted input keeps the value of the recipe or, on a resume, of the run."""

    env_name: EnvironmentName | None = None
    """Environment: geospot, or vqa (also visual_qa) for questions about images."""
    model_name: str | None = None
    """Model to start from: a folder or a hub id."""
    total_steps: PositiveInt | None = None
    """Last step of the run."""
    learning_rate: PositiveFloat | None = None
    """Peak learning rate of the policy."""
    curriculum_enabled: bool | None = None
    """Go through the stages of the environment; false uses the last stage from the first step."""
    env_dataset: str | None = None
    """Rows to train on: a file, a folder or a data set on the hub; a tenth is held out for the evaluation."""
    checkpoint_interval: NonNegativeInt | None = None
    """Number of steps between two checkpoints."""
    resume_checkpoint: str | None = None
    """Checkpoint to resume from, or a run, whose newest checkpoint is used."""
    ppo_epochs: PositiveInt | None = None
    """Passes over the episodes of a step."""
    clip_epsilon: Fraction | None = None
    """Clipping range of PPO's ratio, on both sides."""
    value_coef: PositiveFloat | None = None
    """Weight of the value loss."""
    entropy_coef: NonNegativeFloat | None = None
    """Weight of the entropy bonus."""
    gamma: Fraction | None = None
    """Discount factor per token."""
    gae_lambda: Fraction | None = None
    """Lambda of generalised advantage estimation."""
    settings: dict[str, Any] = Field(default={})
    """Further recipe settings by dotted name, such as rollout.engine; mixtrain's workflow has no such input."""


class EvaluationInputs(Section):
    """The inputs of vlm-rl-eval."""

    env_name: EnvironmentName | None = None
    """Environment; default: the one that trained_model was trained in, or geospot if its folder does not tell."""
    trained_model: str
    """Model to evaluate: a run, a checkpoint, an exported folder, a hub id, or the address of a server."""
    baseline_model: str | None = None
    """Model to compare it with, named in the same ways."""
    num_episodes: PositiveInt = 100
    """Number of test rows that both models answer, with one greedy episode each; all rows if there are fewer."""
    settings: dict[str, Any] = Field(default={})
    """Further recipe settings by dotted name; mixtrain's workflow has no such input."""


RECORDS: Mapping[str, type[Section]] = {"vlm-rl-training": TrainingInputs, "vlm-rl-eval": EvaluationInputs}


def read_inputs(record: type[Inputs], source: str) -> Inputs:
    """The inputs from a JSON text, or from the file of that name; ConfigError names the input that is wrong."""
    text, where = (source, "--input") if source.lstrip().startswith("{") else (_content(source), source)
    try:
        given = json.loads(text, object_pairs_hook=_each_once)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} line {error.lineno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply for an object of inputs; flatten it") from None
    except ConfigError:
        raise
    except ValueError as error:
        reason = str(error).partition(";")[0]
        raise ConfigError(f"{where}: a number is too long ({reason}); shorten it") from None
    if not isinstance(given, dict):
        raise ConfigError(f'{where}: {show(given)} is not an object of inputs; write {{"total_steps": 100}}')
    return checked(record, given)


def checked(record: type[Inputs], given: Mapping[str, object]) -> Inputs:
    """The record of these inputs; ConfigError names the first one that is unknown, missing or has an unfit value."""
    check_names(record, given)
    for name, value in given.items():
        check_depth(value, name)
    try:
        return record.model_validate(dict(given), strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        name = str(details["loc"][0])
    allowed = type_text(record.model_json_schema()["properties"][name])
    if name not in given:
        raise ConfigError(f"{name}: must be given; allowed: {allowed}")
    raise ConfigError(f"{name}: {show(given[name])} does not fit; allowed: {allowed}{hint(name, given[name], allowed)}")


def check_names(record: type[Section], given: Mapping[str, object], others: Sequence[str] = ()) -> None:
    """Raise ConfigError for the first name that is neither an input of the record nor in `others`."""
    known = [*record.model_fields, *others]
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        raise ConfigError(f"{unknown}: no such input; {_meant(unknown, record, known)}")


def keys_of(name: str) -> tuple[str, ...]:
    """The settings that an input stands for; empty if it does not stand for one value of a recipe."""
    counterpart = systems()["mixtrain"].by_key.get(name)
    return counterpart.ours if counterpart else ()


def settings_of(inputs: Section, *apart: str) -> dict[str, object]:
    """Recipe settings that the given inputs stand for, except those `apart`, and those in the input `settings`."""
    given = inputs.model_dump(include=inputs.model_fields_set - {"settings", *apart}, exclude_none=True)
    own = {key: value for name, value in given.items() for key in keys_of(name)}
    settings: dict[str, object] = inputs.model_dump()["settings"]
    named = inputs.model_dump(include=inputs.model_fields_set - {"settings"}, exclude_none=True)
    twice = next((name for name in named for key in keys_of(name) if key in settings), None)
    if twice is not None:
        raise ConfigError(
            f"{twice}: the input settings also sets {keys_of(twice)[0]}, which is the same; remove one of them"
        )
    return own | settings


@contextmanager
def errors_name_inputs(inputs: Section) -> Iterator[None]:
    """Prefix an error about a setting with the input that stands for it."""
    try:
        yield
    except (ConfigError, DataError, ModelError, MissingExtraError) as error:
        name = next((name for name in inputs.model_fields_set if _is_about(str(error), name)), None)
        if name is None:
            raise
        raise ConfigError(f"{name}: {error}") from error


def _is_about(message: str, name: str) -> bool:
    # a key without a dot, such as max_steps, also occurs in messages about other keys, but not at their beginning
    keys = (*keys_of(name), *(key for key, about in ABOUT_ROWS.items() if about == name))
    return any(message.startswith(f"{key}=") or ("." in key and key in message) for key in keys)


def _content(source: str) -> str:
    try:
        return Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--input {source}: cannot be read ({reason}); give a JSON file, or a JSON text") from None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice}: given twice; remove one of them")
    return dict(pairs)


def _meant(unknown: str, record: type[Section], known: Sequence[str]) -> str:
    """Advice on an unknown input, with a name to use in its place."""
    same = [name for name in known if unknown in keys_of(name)]
    near = same or difflib.get_close_matches(unknown, known, n=1, cutoff=CLOSE_ENOUGH)
    if near:
        return f"did you mean {near[0]}?"
    other = next((flow for flow, each in RECORDS.items() if each is not record and unknown in each.model_fields), None)
    if other is not None:
        return f"it is an input of {other}"
    if _is_setting(unknown):
        return f'give a recipe setting as "settings": {{"{unknown}": ...}}'
    return f"the inputs are {', '.join(known)}"


def _is_setting(key: str) -> bool:
    try:
        return bool(describe(key))
    except ConfigError:
        return False
