"""Checks config keys through which transformers imports packages or fetches hub code: only known values are allowed.

`auto_map` is not checked: it is ignored without `trust_remote_code`, which Fovea never sets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name
from transformers.utils.hub import cached_file

from fovea.errors import ModelError
from fovea.utils.config_numbers import check_numbers
from fovea_gym.utils.bounded import read_file

IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
"""Allowed values of keys that may also name a kernel on the hub. The keys also occur as _KEY and KEY_internal."""
NUMBERED = ("config.json", "preprocessor_config.json", "processor_config.json")
"""Files whose numbers are checked against ranges."""
ADAPTER_CONFIG = "adapter_config.json"


def check_config_keys(path: str, revision: str, setting: str = "model.path") -> None:
    """ModelError if config.json or tokenizer_config.json makes transformers fetch a kernel or import another package.

    The numbers in config.json and in the processor's files are also checked, before anything is built from them. An
    adapter in the same folder is refused: transformers would apply it and import modules that its config names.
    """
    config, tokenizer = (optional_json(path, name, revision) for name in ("config.json", "tokenizer_config.json"))
    for name, key, value in _named(config):
        if value not in (None, *IMPLEMENTATIONS[name]):
            raise ModelError(
                f"{setting}={path}: {key}={value!r} in its config.json names a kernel that transformers may fetch and "
                f"run; delete the key, or set it to one of {', '.join(IMPLEMENTATIONS[name])}"
            )
    for file in NUMBERED:
        check_numbers(f"{setting}={path}", file, optional_json(path, file, revision))
    for file, content in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        _check_tokenizer_class(f"{setting}={path}", file, content.get("tokenizer_class"))
    if optional_file(path, ADAPTER_CONFIG, revision) is not None:
        raise ModelError(
            f"{setting}={path} has an {ADAPTER_CONFIG}, which transformers would apply to the model; give the "
            "folder as model.lora.adapter, and its base as model.path"
        )


def check_unquantized(path: str, revision: str) -> None:
    """ModelError for quantized weights, which need another package or a kernel of the hub to unpack them."""
    for _, key, _ in _walk(optional_json(path, "config.json", revision), {"quantization_config", "fusion_config"}):
        raise ModelError(
            f"model.path={path}: {key} in its config.json makes transformers import a package or fetch a kernel; "
            "give the original model, in float32 or bfloat16"
        )


def optional_json(path: str, name: str, revision: str) -> Mapping[str, Any]:
    """A JSON object from a model folder or hub id; empty if there is no such file."""
    file = optional_file(path, name, revision)
    content = {} if file is None else json.loads(read_file(file))
    if not isinstance(content, Mapping):
        raise ModelError(f"model.path={path}: its {name} is not a JSON object; download it again")
    return content


def optional_file(path: str, name: str, revision: str) -> Path | None:
    """A file from a model folder or hub id; None if there is no such file."""
    file = cached_file(
        path,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if file is None else Path(file)


def _check_tokenizer_class(where: str, file: str, name: object) -> None:
    """ModelError unless transformers reads the tokenizer only from tokenizer.json: others import their own packages."""
    if name is None:
        return
    known = name if isinstance(name, str) else ""
    found = tokenizer_class_from_name(f"{known.removesuffix('Fast')}Fast") or tokenizer_class_from_name(known)
    # transformers itself refuses unknown names
    if not known or (found is not None and not issubclass(found, transformers.PreTrainedTokenizerFast)):
        raise ModelError(
            f"{where}: tokenizer_class={name!r} in its {file} is not a class that transformers reads "
            "from tokenizer.json; save the tokenizer as PreTrainedTokenizerFast"
        )


def _named(config: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """Kind, key and value of each implementation that a config or one of its parts names."""
    keys = {f"{start}{kind}{end}" for kind in IMPLEMENTATIONS for start in ("", "_") for end in ("", "_internal")}
    for key, dotted, value in _walk(config, keys):
        kind = key.removeprefix("_").removesuffix("_internal")
        for each in value.values() if isinstance(value, Mapping) else [value]:
            yield kind, dotted, each


def _walk(config: Mapping[str, Any], keys: set[str], above: str = "") -> Iterator[tuple[str, str, Any]]:
    """Key, dotted name and value of each of these keys, at any depth."""
    for key, value in config.items():
        if key in keys and value is not None:
            yield key, above + key, value
        elif isinstance(value, Mapping):
            yield from _walk(value, keys, f"{above}{key}.")
