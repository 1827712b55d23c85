"""The fingerprint of a run's inputs (rows, the user's code, model files, libraries), and their changes at a resume.

A fingerprint maps names to short texts: `train row 24` to a checksum of that row, `file train.parquet` to its size and
checksum, `library torch` to a version. Each checkpoint holds it.

It takes seconds, however large the data are. Large files are read in evenly spaced blocks (MAX_FILE_BYTES in all for
rows, and again for models). If rows are made on access, MAX_ROWS of each split are read; rows in a list are all read.
Data at a URL count by their address. Modules that the user's file imports count if they are in its folder or in the
working directory.
"""

from __future__ import annotations

import glob
import hashlib
import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import Distribution, version
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any, TypeAlias

import numpy as np
from huggingface_hub import try_to_load_from_cache
from PIL.Image import Image

from fovea import __version__
from fovea.config.model import Model
from fovea.config.run import Config
from fovea_gym.environments.custom.loading import imported_files, name_of
from fovea_gym.errors import DataError
from fovea_gym.rows.images import is_url
from fovea_gym.rows.readers.base import FORMATS
from fovea_gym.rows.tasks import place_of
from fovea_gym.settings.environments import OwnEnvironment
from fovea_gym.settings.rewards import FROM_PYTHON
from fovea_gym.settings.splits import RUN_DIR
from fovea_gym.types import ImageRef, Task
from fovea_gym.utils.entry_points import registered

Fingerprint: TypeAlias = Mapping[str, str]
LIBRARY = "library "
"""Prefix of the names of library versions."""
MAX_NAMED = 3
"""Number of changes that a message names; it only counts the others."""
MAX_FILE_BYTES = 2**30
MAX_IMAGE_BYTES = 2**20
MAX_ROWS = 1000
_MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py")
_BLOCK_BYTES = 2**20
_DIGITS = 12
"""Hexadecimal digits of a checksum that are kept: one in 2^48 changes would go unnoticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenCode:
    """The user's own code that was given as Python objects instead of file names."""

    environment: Any = None
    rewards: Sequence[Callable[..., object]] = ()
    tools: Sequence[object] = ()


def take_fingerprint(
    config: Config, model: Model, splits: Mapping[str, Sequence[Task]], given: GivenCode
) -> Fingerprint:
    """The fingerprint of the inputs of a run with these settings and rows by split; `model` has a path."""
    return {
        **_files({f"file {_name(path, config)}": path for path in _row_files(config)}),
        **{name: text for split, tasks in splits.items() for name, text in row_texts(split, tasks)},
        **dict(_code(config, given)),
        **_files(dict(model_files(config, model))),
        f"{LIBRARY}fovea": __version__,
        **{f"{LIBRARY}{name}": version(name) for name in ("torch", "transformers")},
        **{f"{LIBRARY}{each.name}": each.version for each in _packages(config)},
    }


def _packages(config: Config) -> Iterator[Distribution]:
    """The packages that provide the environments, the loss and the engine of the settings."""
    parts = [("fovea.environments", each.name) for each in config.environments.values()]
    parts += [("fovea.losses", config.algorithm.loss.name), ("fovea.engines", config.rollout.engine.name)]
    for group, name in parts:
        yield from (point.dist for point in registered(group).get(name, ()) if point.dist is not None)


def _row_files(config: Config) -> Iterator[Path]:
    """The local files that the settings name for rows; for a folder, its files that may hold a table."""
    splits = itertools.product(config.with_own_files.environments.values(), ("train", "dev", "test"))
    named = (getattr(environment, f"{split}_files", None) or () for environment, split in splits)
    for source in (source for files in named for source in files):
        path = Path(source if Path(source).expanduser().exists() else source.rpartition("@")[0] or source).expanduser()
        if is_url(source):
            continue
        if path.is_dir():
            yield from (file for file in path.rglob("*") if file.suffix in FORMATS)
        else:
            yield from [path] if path.is_file() else map(Path, glob.glob(str(path), recursive=True))


def _name(file: Path, config: Config) -> str:
    """The name of a file in the fingerprint; files in the run folder are named relative to it, since it may change."""
    folder = Path(config.run_dir)
    return f"{RUN_DIR}/{file.relative_to(folder)}" if file.is_relative_to(folder) else str(file)


def row_texts(split: str, tasks: Sequence[Task]) -> Iterator[tuple[str, str]]:
    yield f"number of {split} rows", str(len(tasks))
    count = len(tasks) if isinstance(tasks, list | tuple) else min(len(tasks), MAX_ROWS)
    for index in np.linspace(0, len(tasks) - 1, count).astype(int).tolist():
        place = place_of(tasks, index)
        yield f"{split} row {index}" + (f" ({place.where})" if place else ""), _row(tasks, index)


def _row(tasks: Sequence[Task], index: int) -> str:
    try:
        task = tasks[index]
    except DataError:
        return "a bad row"
    return _digest((task.question, task.answer, task.kind, task.images, task.row))


def _digest(values: object, text: str = "") -> str:
    """Checksum of a text together with the content of values."""
    digest = hashlib.sha256(text.encode())
    for part in _parts(values):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:_DIGITS]


def _parts(value: object) -> Iterator[bytes]:
    """Yield the content of a value, piece by piece; for an object of unknown type, only the name of its type."""
    match value:
        case bytes():
            yield value
        case str() | int() | float() | None:
            yield str(value).encode("utf-8", "surrogatepass")
        case np.ndarray():
            yield from _parts((str(value.shape), value.tobytes()))
        case Image():
            yield from _parts((str(value.size), value.mode, value.tobytes()))
        case ImageRef(source=str() as name):
            yield name.encode("utf-8", "surrogatepass") if is_url(name) else _image_file(Path(name))
        case ImageRef(source=source):
            yield from _parts(source)
        case Mapping():
            yield from _parts(list(value.items()))
        case list() | tuple():
            for each in value:
                yield from _parts(each)
        case _:
            yield type(value).__name__.encode()


def _image_file(path: Path) -> bytes:
    try:
        return checksum(path, MAX_IMAGE_BYTES).encode()
    except OSError:
        return b"a file that cannot be read"  # the row is reported as a bad one when the run reads it


def _code(config: Config, given: GivenCode) -> Iterator[tuple[str, str]]:
    """Checksums of the user's own rewards, environments and tools: of their files, or of the given objects' source."""
    own = [(key, each.file) for key, each in config.environments.items() if isinstance(each, OwnEnvironment)]
    own += [("environment.tools", tool) for tool in config.environment.tools if ".py:" in tool]
    for setting, spec in [(key, spec) for key, specs in config.rewards.items() for spec in specs] + own:
        if not spec.startswith(FROM_PYTHON):
            file = Path(spec.rpartition(":")[0]).expanduser()
            yield f"code of {setting}={spec}", checksum(file, MAX_FILE_BYTES)
            for module in imported_files(file):
                place = os.path.relpath(module, file.resolve().parent)
                yield f"code of {setting}={spec}, its import {place}", checksum(module, MAX_FILE_BYTES)
    if given.environment is not None:
        yield f"code of the environment {type(given.environment).__name__}", _source(given.environment)
    yield from ((f"code of the reward {name_of(reward)}", _source(reward)) for reward in given.rewards)
    yield from (
        (f"code of the tool {name_of(each)}", _source(each)) for each in given.tools if not isinstance(each, str)
    )


def _source(given: object) -> str:
    """Checksum of the source of a function or an object's class, with bound arguments, defaults and closure values."""
    values: list[object] = []
    while isinstance(given, partial):
        values += [given.args, given.keywords]
        given = given.func
    given = getattr(given, "__func__", given)  # the function of a method
    if isinstance(given, FunctionType):
        values += [given.__defaults__, given.__kwdefaults__, [_content(cell) for cell in given.__closure__ or ()]]
    return _digest(values, _text_of(given))


def _text_of(given: object) -> str:
    try:
        return inspect.getsource(given if isinstance(given, FunctionType) else type(given))
    except (OSError, TypeError):
        # code that was typed into an interpreter has no source file
        return _bytecode(given.__code__) if isinstance(given, FunctionType) else "without a source file"


def _bytecode(code: CodeType) -> str:
    """Bytecode of a function, for functions without source."""
    constants = [_bytecode(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return repr((code.co_code, code.co_names, constants))


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty, as in a function that refers to itself
        return None


def model_files(config: Config, model: Model) -> Iterator[tuple[str, Path]]:
    """The files of the policy's model, of the adapter that it starts from, and of the reward model."""
    folders = {
        "model": _model_folder(model),
        "adapter": Path(model.lora.adapter) if model.lora and model.lora.adapter else None,
        "reward model": Path(config.reward_model.path) if config.reward_model else None,
    }
    for name, folder in folders.items():
        found = sorted(folder.expanduser().glob("*")) if folder else []
        yield from ((f"file of the {name} {file.name}", file) for file in found if file.suffix in _MODEL_FILES)


def _model_folder(model: Model) -> Path | None:
    """The folder of a model: its path, or its snapshot in the cache of the hub."""
    assert model.path is not None, "a tiny model has a folder by now"
    if Path(model.path).expanduser().is_dir():
        return Path(model.path)
    cached = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
    return Path(cached).parent if isinstance(cached, str) else None


def _files(paths: Mapping[str, Path]) -> dict[str, str]:
    """Entries of files by name; at most MAX_FILE_BYTES are read in all."""
    return {name: checksum(path, MAX_FILE_BYTES // len(paths)) for name, path in paths.items()}


def checksum(path: Path, max_bytes: int) -> str:
    """Size and checksum of a file; the checksum covers about `max_bytes` of a larger file, in evenly spaced blocks."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= max_bytes:
            return f"{size} bytes, {hashlib.file_digest(file, 'sha256').hexdigest()[:_DIGITS]}"
        digest, block = hashlib.sha256(), min(_BLOCK_BYTES, max_bytes)
        for start in np.linspace(0, size - block, max(2, max_bytes // block)).astype(int).tolist():
            file.seek(start)
            digest.update(file.read(block))
    return f"{size} bytes, {digest.hexdigest()[:_DIGITS]} in part"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputChange:
    """An entry of a fingerprint that has changed."""

    name: str
    before: str | None
    """None: there was no such entry."""
    now: str | None

    @property
    def is_patch(self) -> bool:
        """True if only the patch version of a library changed, such as 2.9.0 to 2.9.1."""
        if not self.name.startswith(LIBRARY) or self.before is None or self.now is None:
            return False
        return self.before.split(".")[:2] == self.now.split(".")[:2]

    def __str__(self) -> str:
        return f"{self.name} was {self.before or 'absent'} and is {self.now or 'absent'}"


def library_versions(fingerprint: Fingerprint) -> dict[str, str]:
    """The versions of libraries in a fingerprint, by name."""
    return {name.removeprefix(LIBRARY): text for name, text in fingerprint.items() if name.startswith(LIBRARY)}


def changes(before: Fingerprint, now: Fingerprint) -> list[InputChange]:
    """The entries that differ between two fingerprints, in the order of the fingerprints."""
    return [
        InputChange(name=name, before=before.get(name), now=now.get(name))
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]


def check_unchanged(before: Fingerprint, now: Fingerprint, *, allow: bool, say: Callable[[str], None]) -> None:
    """DataError that names the changes; with `allow`, or if only patch versions changed, print them instead."""
    changed = changes(before, now)
    refused = [] if allow else [change for change in changed if not change.is_patch]
    if refused:
        raise DataError(
            f"inputs of this run have changed since its checkpoint: {_listed(refused)}; restore them, set "
            "resume_changed=allow to continue with the changed ones, or start over in another run_dir"
        )
    if changed:
        say(f"inputs have changed since the checkpoint: {_listed(changed)}")


def _listed(changed: Sequence[InputChange]) -> str:
    more = f"; and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
    return "; ".join(map(str, changed[:MAX_NAMED])) + more
