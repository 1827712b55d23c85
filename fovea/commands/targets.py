"""Targets of evaluation and export: arguments of the command line become targets, targets become models.

A target is a run folder (its newest checkpoint), one of its checkpoints, a model folder or Hub id, a folder with only
an adapter, a server, or a baseline. A checkpoint's model has the settings of its run; other models have the settings of
the evaluation with another `model.path`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fovea.commands.trust import check_packages, check_trust
from fovea.config.loading import keys_of, load_config
from fovea.config.recipes import Override, section_of, shipped_recipes
from fovea.config.run import Config
from fovea.errors import ModelError
from fovea.models.adapter_files import ADAPTER_CONFIG, merge_adapter
from fovea.models.load import load_network
from fovea.models.policy_network import PolicyNetwork
from fovea.models.processor import Processor, load_processor
from fovea.models.trainable import factored_weights
from fovea.report.about import CONFIG_FILE
from fovea.run.checkpoint import Checkpoints, DamagedCheckpointError, is_checkpoint, read_checkpoint
from fovea.train.torch.checkpoint import load_trained
from fovea.train.torch.sharding import copy_weights
from fovea.wiring.environment import make_environment
from fovea.wiring.megatron import saved_by_megatron
from fovea.wiring.model import locate_model, make_vlm, open_vlm
from fovea.wiring.model_trial import try_model
from fovea_gym.environments.base import Environment
from fovea_gym.errors import ConfigError, DataError, FoveaError
from fovea_gym.settings.base import Section, leaves
from fovea_gym.settings.rewards import reward_tuple
from fovea_gym.settings.splits import SplitFiles
from fovea_gym.utils.addresses import http_parts, is_hub_id, near_folder
from fovea_gym.utils.bounded import check_inside, read_file
from fovea_gym.utils.shown_text import without_secrets

RECIPE_FILE = "recipe.yaml"
"""File in an exported folder with the settings of its run."""
CONSTANT = "constant:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A target without a model: majority, gold, or constant:TEXT with the answer to every question."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTarget:
    """A checkpoint of a run."""

    name: str
    folder: Path
    run: Path
    """The run folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTarget:
    """A Hugging Face model: a folder or Hub id."""

    name: str
    path: str
    revision: str | None = None
    adapter: Path | None = None
    """A folder with a peft adapter for that model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTarget:
    """A model on an OpenAI-compatible server."""

    name: str
    url: str
    """Address without `/v1`."""
    model: str | None
    """Name of the model on the server; None: the only model there."""
    api_key_env: str | None = None
    """Environment variable with the server's key."""


Target = Baseline | CheckpointTarget | ModelTarget | ServerTarget


def parse_targets(words: Sequence[str], api_key_env: str | None = None) -> list[Target]:
    """Parse several targets; servers get the key. ConfigError if two targets are the same."""
    targets = [parse_target(word) for word in words]
    targets = [replace(each, api_key_env=api_key_env) if isinstance(each, ServerTarget) else each for each in targets]
    names = [target.name for target in targets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice}: named twice, but a target has one column; remove one of them")
    return targets


def parse_target(word: str) -> Target:
    """Parse a target; ConfigError if the word is not a target."""
    if word in ("majority", "gold") or word.startswith(CONSTANT):
        return Baseline(name=word)
    if word.startswith(("http://", "https://")):
        return _server_target(word)
    folder = Path(word)
    if (folder / ADAPTER_CONFIG).is_file():
        return ModelTarget(name=word, path=_base_of(folder), adapter=folder)
    if (folder / "config.json").is_file():
        return ModelTarget(name=word, path=word)
    if folder.is_dir():
        return find_checkpoint(folder)
    if folder.expanduser().is_file():
        raise ConfigError(
            f"{word}: a file, not a folder; name the folder of the run or model, and a recipe as recipe=FILE"
        )
    path, _, revision = word.partition("@")
    if is_hub_id(path):
        return ModelTarget(name=word, path=path, revision=revision or None)
    if word in shipped_recipes():
        raise ConfigError(f"{word}: a recipe, not a target; give recipe={word} together with a target")
    near = near_folder(folder.expanduser())
    fix = (
        f"did you mean {near}?"
        if near
        else "a target is a run, a checkpoint, a model folder, a Hub id such as Qwen/Qwen3-VL-2B-Instruct, the "
        f"address of a server, or one of the baselines majority, gold and {CONSTANT}TEXT"
    )
    raise ConfigError(f"{word}: no such folder; {fix}")


def _server_target(word: str) -> ServerTarget:
    """A server at `URL` or `URL#MODEL`; ConfigError for a URL that contains a password or key."""
    parts = http_parts(word)
    if parts is None or parts.username is not None or parts.query:
        raise ConfigError(
            f"{without_secrets(word)}: a server's address is http://HOST:PORT, or http://HOST:PORT#MODEL; a key comes "
            "from api_key_env=VARIABLE"
        )
    url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
    return ServerTarget(name=word, url=url, model=parts.fragment or None)


def find_checkpoint(folder: Path) -> CheckpointTarget:
    """Find the checkpoint of a folder: the folder itself, or the newest checkpoint of a run folder."""
    if is_checkpoint(folder):
        # resolved, because a spelling such as `runs/x/checkpoints/step-4/.` has other parents
        run = folder.resolve().parents[1]
        if not (run / CONFIG_FILE).is_file():
            raise ConfigError(f"{folder}: no {CONFIG_FILE} in its run folder {run}; move the file back there")
        check_inside(run / CONFIG_FILE, run)
        _check_whole(folder, run)
        return CheckpointTarget(name=str(folder), folder=folder, run=run)
    newest = Checkpoints(folder, keep=1).latest() if (folder / CONFIG_FILE).is_file() else None
    if newest is None:
        raise ConfigError(
            f"{folder}: neither a run with a checkpoint, nor a checkpoint, nor a model folder with a config.json; "
            "give one of these"
        )
    for read in (folder / CONFIG_FILE, newest.folder):
        check_inside(read, folder)
    if newest.passed_over:
        raise DataError(f"{newest.passed_over[0]} is damaged; name {newest.folder} for the checkpoint before it")
    return CheckpointTarget(name=f"{folder} step {newest.step}", folder=newest.folder, run=folder)


@contextmanager
def naming_deletion(checkpoint: Path) -> Iterator[None]:
    """A block that reads a checkpoint; DataError, with the cause, if its run deletes it meanwhile."""
    try:
        yield
    except (FoveaError, OSError) as error:
        if checkpoint.exists():
            raise
        raise DataError(
            f"{checkpoint} was deleted while it was read: its run is still going, and keeps only the newest "
            "checkpoint.keep of them; name the newest one, or set a larger checkpoint.keep for the run"
        ) from error


def _check_whole(checkpoint: Path, run: Path) -> None:
    """DataError if a checkpoint is damaged; it names an undamaged one of the same run."""
    try:
        with naming_deletion(checkpoint):
            read_checkpoint(checkpoint)
    except DamagedCheckpointError as error:
        whole = Checkpoints(run, keep=1).latest()
        assert whole is not None, "a checkpoint is damaged, but its run has none"
        raise DataError(f"{error}; name {whole.folder} instead, which is whole") from error


def _base_of(adapter: Path) -> str:
    try:
        base = json.loads(read_file(adapter / ADAPTER_CONFIG)).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"{adapter / ADAPTER_CONFIG} cannot be read ({error}); export the adapter again") from error
    if not base:
        raise ModelError(f"{adapter}: its {ADAPTER_CONFIG} names no base model; write it under base_model_name_or_path")
    return str(base)


def shared_settings(
    targets: Sequence[Target], recipe: Path | None, overrides: Sequence[Override], *, trust: bool = False
) -> Config:
    """Settings for the rows and prompts of an evaluation: those of the recipe, or of the first target with settings.

    ConfigError if the targets' environments differ and no recipe decides, or if a target's own settings would run code
    that `trust` does not allow.
    """
    if recipe is not None:
        return load_config([recipe], overrides)
    sources = [file for target in targets if (file := settings_file(target)) is not None]
    if not sources:
        raise ConfigError(
            "no target says which rows to evaluate on; give a recipe that does (recipe=FILE, or a name such as geo3k), "
            "or rows from Python"
        )
    for file in sources:
        check_packages(file, overrides, trust=trust)
    configs = [load_config([file], overrides) for file in sources]
    for file, config in zip(sources, configs, strict=True):
        if (_environment(config), _reward(config)) != (_environment(configs[0]), _reward(configs[0])):
            raise ConfigError(
                f"{sources[0]} and {file} have different environments ({_first_difference(configs[0], config)}); "
                "give a recipe (recipe=FILE) that says which rows to evaluate on"
            )
    check_trust(configs[0], sources[0], overrides, trust=trust)
    run = next((target.run for target in targets if isinstance(target, CheckpointTarget)), None)
    is_of_run = run is not None and sources[0] == run / CONFIG_FILE and "run_dir" not in keys_of(overrides)
    # the folder may have been moved; its rows are there
    return configs[0].model_copy(update={"run_dir": str(run)}) if is_of_run else configs[0]


def settings_file(target: Target) -> Path | None:
    """File with the settings that a target was trained with; None if there is no such file."""
    if isinstance(target, CheckpointTarget):
        return target.run / CONFIG_FILE
    if isinstance(target, ModelTarget):
        file = (target.adapter or Path(target.path)) / RECIPE_FILE
        return file if file.is_file() else None
    return None


def _environment(config: Config) -> Section:
    """The environment in a form that is equal for runs with the same rows."""
    environment = config.environment
    return environment.of_any_run() if isinstance(environment, SplitFiles) else environment


def _reward(config: Config) -> str:
    weights = "" if config.reward_weights is None else f" with reward_weights={list(config.reward_weights)}"
    return f"{', '.join(reward_tuple(config.reward)) or None}{weights}"


def _first_difference(first: Config, second: Config) -> str:
    if _environment(first) == _environment(second):
        return f"reward: {_reward(first)} and {_reward(second)}"
    one, other = (leaves(_environment(config).model_dump()) for config in (first, second))
    key = next(key for key in (*one, *other) if one.get(key) != other.get(key))
    return f"environment.{key}: {one.get(key)} and {other.get(key)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A target's model, loaded for evaluation or export."""

    config: Config
    """Settings of the model."""
    processor: Processor
    vlm: PolicyNetwork
    left_out: tuple[str, ...] = ()
    """Folders and tensors of the checkpoint that do not belong to the model."""


def open_model(
    target: CheckpointTarget | ModelTarget, shared: Config | None, overrides: Sequence[Override], *, trust: bool = False
) -> OpenedModel:
    """Load a target; `shared` is for models without settings, and checkpoints use `overrides` of model and train."""
    if isinstance(target, CheckpointTarget):
        own = [each for each in overrides if section_of(each) in ("model", "train")]
        check_packages(target.run / CONFIG_FILE, overrides, trust=trust)
        return _open_checkpoint(target, own, trust=trust)
    assert shared is not None, "a model without settings needs shared ones"
    # images are encoded as the shared settings say, so that targets are comparable
    settings = shared.model.model_copy(
        update={
            "path": target.path,
            "revision": target.revision or (shared.model.revision if target.path == shared.model.path else None),
            "tiny": None,
            "lora": None,
            "freeze_vision_tower": not shared.model.trains_vision,
            "freeze_projector": None,
        }
    )
    config = shared.model_copy(update={"model": settings})
    try_model(settings)
    processor, network = load_processor(settings), load_network(settings)
    if target.adapter is not None:
        merge_adapter(network, target.adapter)
    return OpenedModel(config=config, processor=processor, vlm=make_vlm(config, network, processor.banned_ids))


def _without_first_adapter(config: Config) -> Config:
    """The settings without the adapter that training started from: the checkpoint holds the trained adapter."""
    lora = config.model.lora
    if lora is None or lora.adapter is None:
        return config
    model = config.model.model_copy(update={"lora": lora.model_copy(update={"adapter": None})})
    return config.model_copy(update={"model": model})


def open_checkpoint(
    target: CheckpointTarget, overrides: Sequence[Override] = (), *, trust: bool = False
) -> OpenedModel:
    """Load a checkpoint; `trust` allows code that the settings name, to make a tiny model again."""
    check_packages(target.run / CONFIG_FILE, overrides, trust=trust)
    return _open_checkpoint(target, overrides, trust=trust)


def _open_checkpoint(target: CheckpointTarget, overrides: Sequence[Override], *, trust: bool) -> OpenedModel:
    with naming_deletion(target.folder):
        file = target.run / CONFIG_FILE
        config = _without_first_adapter(load_config([file], overrides))
        if not config.train.backend.shares_network and not trust:
            raise ConfigError(
                f"{target.name} is a checkpoint of train.backend=megatron and contains a pickle, which can "
                "run code when it is read; add trust=True if the run is your own"
            )

        def environment() -> Environment:
            check_trust(config, file, overrides, trust=trust)
            return make_environment(config).environment

        model = locate_model(config, target.run, environment)
        processor = load_processor(model)
        vlm = open_vlm(config, model, processor.banned_ids)
        if config.train.backend.shares_network:
            left_out = load_trained(target.folder, vlm)
        else:
            saved = saved_by_megatron(config, model, vlm.banned_ids, target.folder)
            copy_weights(saved.weights, dict(factored_weights(vlm.network)))
            left_out = saved.left_out
        return OpenedModel(config=config, processor=processor, vlm=vlm, left_out=left_out)
