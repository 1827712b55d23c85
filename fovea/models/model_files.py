"""Checks of a model folder or hub id, with one-line errors for missing and damaged files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from safetensors import SafetensorError
from transformers.utils import logging

from fovea.config.model import Model
from fovea.errors import ModelError
from fovea_gym.errors import first_line
from fovea_gym.utils.addresses import is_hub_id, near_folder

# an index may name pickles, which torch refuses to load; a config may name a package that is not installed
UNREADABLE: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    RuntimeError,
    KeyError,
    ImportError,
    SafetensorError,
    UnpicklingError,
)
WHOLE_MODEL = "download the whole model again, or give another folder"


def hub_options(settings: Model) -> dict[str, Any]:
    """Arguments for every call of `from_pretrained`."""
    return {"trust_remote_code": False, "revision": settings.revision or "main"}


@contextmanager
def damaged_model(path: str, *others: type[Exception]) -> Iterator[None]:
    """Turn the errors of transformers about missing or damaged files, and `others`, into a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except (*UNREADABLE, *others) as error:
        first_line = str(error).strip().split("\n")[0].rstrip(".")
        fix = WHOLE_MODEL
        if not Path(path).is_dir():
            fix = (
                f"there is no folder {path} in {Path.cwd()}, so it is read as the id of a model on the hub; correct "
                "it, or download that model again if its files are damaged"
            )
        raise ModelError(f"model.path={path}: {first_line}; {fix}") from error


def check_place(path: str, revision: str | None) -> None:
    """ModelError when `path` is neither a hub id nor a folder."""
    folder = Path(path)
    if folder.is_dir() and revision is not None:
        raise ModelError(
            f"model.revision={revision}, but model.path={path} is a folder, and only hub ids have revisions; set "
            "model.revision=null"
        )
    if folder.is_file():
        raise ModelError(f"model.path={path} is a file; give the folder that holds it, {folder.parent}")
    if not folder.is_dir() and not is_hub_id(path):
        # checked here, since transformers would first query the hub for half a minute
        near = near_folder(folder.expanduser())
        fix = f"did you mean {near}?" if near else "give a model folder or a hub id such as Qwen/Qwen3-VL-2B-Instruct"
        raise ModelError(f"model.path={path}: no such folder; {fix}")
    if not folder.is_dir():
        _check_hub(path, revision or "main")


def _check_hub(path: str, revision: str) -> None:
    """ModelError if the hub cannot be reached and the model is not in the cache.

    Tries only once: transformers and huggingface_hub would try each file six times, which takes half a minute per file.
    """
    if isinstance(try_to_load_from_cache(path, "config.json", revision=revision), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(path, "config.json", revision=revision))
    except (HfHubHTTPError, OfflineModeIsEnabled):
        return  # reported when the file is read
    except Exception as error:  # the class differs between versions of huggingface_hub, which changed its HTTP client
        raise ModelError(
            f"model.path={path}: not in the local cache, and no connection to the hub ({first_line(error)}); give a "
            "folder that holds the model, or set HF_ENDPOINT to a mirror that this machine can reach"
        ) from error


def check_folder(path: str, revision: str | None) -> None:
    """ModelError when `path` is neither a hub id nor a folder with a config and weights."""
    check_place(path, revision)
    folder = Path(path)
    if not folder.is_dir():
        return
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model.path={path}: the folder has no config.json; give the folder that holds the model's files"
        )
    odd = next((file for file in folder.iterdir() if file.exists() and not (file.is_file() or file.is_dir())), None)
    if odd is not None:
        raise ModelError(f"model.path={path}: {odd.name} is neither a file nor a folder, and cannot be read; delete it")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"model.path={path}: the folder has a config.json but no weights (*.safetensors); "
            "download the whole model, or convert its .bin files to safetensors"
        )


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hide transformers' progress bar, since the terminal shows the run's own display."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


CONFIG = "tokenizer_config.json"
GENERIC = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""The class name that transformers 5 writes for a plain tokenizer.json, and the name that both versions accept."""


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer as `save_pretrained` does, but with the setting names of transformers 4.

    Version 5 accepts these too, while version 4 fails on the list and the class name that version 5 writes.
    """
    tokenizer.save_pretrained(folder)
    file = folder / CONFIG
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = GENERIC.get(settings["tokenizer_class"], settings["tokenizer_class"])
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
