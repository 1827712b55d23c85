"""The folder of a run: made once, never mixed up with another run."""

from __future__ import annotations

from pathlib import Path

import yaml

from fovea.config.loading import dump_config
from fovea.config.run import Config
from fovea.errors import ConfigError
from fovea.utils.files import write_atomically

CONFIG_FILE = "config.yaml"
MAY_CHANGE = (
    *("run_dir", "max_steps", "resume", "threads", "log", "checkpoint", "evaluate", "parity", "profile"),
    # where and in what pieces things are computed, not what: the way out of a batch that does not fit
    *("model.device", "model.feature_cache_gib", "model.feature_spill_gib"),
    # the way out of a bad row, or of a server that has become slow
    *("data.on_bad_row", "data.url_timeout_seconds", "data.url_retries", "data.url_cache_gib", "data.cache_dir"),
    *("data.prompt_cache_gib", "rollout.max_batch_tokens", "rollout.reuse_gib", "model.attention"),
    *("train.enable_dynamic_batch_size", "train.groups_per_microbatch", "train.variable_seq_lengths"),
    *("train.max_tokens_per_microbatch", "train.logits_mib", "train.gradient_checkpointing"),
    *("train.liger_kernels", "train.plain_update_every_steps"),
)
"""Settings that a resumed run may have other than it began with."""


def open_run_folder(folder: Path, config: Config) -> Path:
    """Make the folder and write the resolved settings; ConfigError when it holds another run.

    A folder holds a run from its first checkpoint on: a start that failed before may be tried again.
    """
    saved = folder / CONFIG_FILE
    if has_checkpoint(folder):
        if config.resume == "never":
            raise ConfigError(
                f"run_dir={folder} already holds a run; set resume=auto to go on with it, or another run_dir"
            )
        if not saved.exists():
            raise ConfigError(
                f"run_dir={folder} holds checkpoints but no {CONFIG_FILE} that says of which run; set another run_dir"
            )
        _check_same(saved, config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(saved, dump_config(config).encode())
    except OSError as error:
        raise ConfigError(f"run_dir={folder} cannot be written: {error.strerror}; set another run_dir") from error
    return folder


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has begun here: without a checkpoint the settings of the next start may differ."""
    return any(folder.glob("checkpoints/step-*"))


def _check_same(saved: Path, config: Config) -> None:
    try:
        tree = yaml.safe_load(saved.read_text(encoding="utf-8"))
    except yaml.YAMLError:
        tree = None
    if not isinstance(tree, dict):
        raise ConfigError(f"{saved} cannot be read, so that its run cannot go on; set another run_dir")
    before = _fixed_settings(tree)
    now = _fixed_settings(yaml.safe_load(dump_config(config)))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            raise ConfigError(
                f"{key}={now.get(key)}, but the run in {saved.parent} began with {before.get(key)}; set it back "
                "to resume, or start anew in another run_dir"
            )


def _fixed_settings(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Leaves by dotted key, without those that may change."""
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        if f"{prefix}{key}" in MAY_CHANGE:
            continue
        if isinstance(value, dict):
            leaves |= _fixed_settings(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
