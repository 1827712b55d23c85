"""The facts about a run at the head of its report: model, algorithm, data, versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from fovea.config.recipes import read_yaml
from fovea_gym.errors import DataError
from fovea_gym.settings.splits import RUN_DIR
from fovea_gym.utils.bounded import read_file
from fovea_gym.utils.files import write_atomically
from fovea_gym.utils.stored import from_json, to_json

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
VERSIONS_FILE = "versions.json"
MAX_CONFIG_MIB = 1
HINTS_FILE = "hints.txt"
SHOWN_RUNS = 4
"""Maximum number of runs that an error names."""


def check_run_folder(folder: Path) -> None:
    """Raise DataError if a folder does not hold a run."""
    if (folder / CONFIG_FILE).is_file():
        return
    fix = "give the folder of a run, which `fovea train` prints (`fovea view` also takes a folder of runs)"
    if not folder.is_dir():
        what = "a file, not a run folder" if folder.exists() else "no such run folder"
        raise DataError(f"{folder}: {what}; {fix}")
    if inside := sorted(str(each.parent) for each in folder.glob(f"*/{CONFIG_FILE}")):
        fix = f"give a run in it: {', '.join(inside[:SHOWN_RUNS])}{', ...' if len(inside) > SHOWN_RUNS else ''}"
        raise DataError(f"{folder}: not a run folder: no {CONFIG_FILE} in it; {fix}")
    raise DataError(f"{folder}: not a run folder: no {CONFIG_FILE} in it, nor in a folder below; {fix}")


def read_config(run_dir: Path) -> str:
    """Read the text of a run's config.yaml."""
    path = run_dir / CONFIG_FILE
    try:
        return read_file(path, within=run_dir, max_mib=MAX_CONFIG_MIB).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}); restore the file") from error


_VERSIONS = TypeAdapter(dict[str, str])


def write_versions(run_dir: Path, versions: Mapping[str, str]) -> None:
    """Write the versions of the libraries that the run uses now, by library name."""
    write_atomically(run_dir / VERSIONS_FILE, (to_json(_VERSIONS, dict(versions), indent=2) + "\n").encode())


def add_hint(run_dir: Path, text: str) -> None:
    """Store a one-line hint to the user for the end of the run and its report; a stored hint is not repeated."""
    lines = dict.fromkeys([*read_hints(run_dir), " ".join(text.split())])
    write_atomically(run_dir / HINTS_FILE, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))


def read_hints(run_dir: Path) -> list[str]:
    """Read the hints that a run has stored so far."""
    file = run_dir / HINTS_FILE
    return read_file(file, within=run_dir).decode("utf-8", "replace").splitlines() if file.exists() else []


def about(run_dir: Path, config_text: str | None) -> dict[str, str]:
    """Facts about a run as label and text, from its settings and versions; unknown facts are left out."""
    facts = _facts_of_settings(read_yaml(config_text, CONFIG_FILE)) if config_text else {}
    if (versions := _read_versions(run_dir)) is not None:
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return {label: text for label, text in facts.items() if text}


def _facts_of_settings(settings: Any) -> dict[str, str]:
    """The facts that the settings hold; settings of another Fovea version may lack any key."""
    model, environment = _section(settings, "model"), _section(settings, "environment")
    algorithm, rollout = _section(settings, "algorithm"), _section(settings, "rollout")
    parts = [_section(algorithm, part).get("name") for part in ("advantage", "loss")]
    return {
        "model": str(model.get("path") or ("a tiny model with random weights" if model.get("tiny") else "")),
        "algorithm": f"{algorithm.get('name', '')} (advantage {parts[0]}, loss {parts[1]})" if all(parts) else "",
        "environment": str(environment.get("name", "")),
        **{f"{split} rows": _files(environment, split) for split in ("train", "dev", "test")},
        "a step": f"{rollout.get('prompts_per_step')} prompts x {rollout.get('samples_per_prompt')} answers"
        if rollout
        else "",
    }


def _files(environment: Mapping[str, Any], split: str) -> str:
    files, share = environment.get(f"{split}_files"), environment.get(f"{split}_share")
    if files is None and share:
        return f"{100 * float(share):g} % of the training rows, held out by image"
    return ", ".join(map(_file, files or ()))


def _file(name: object) -> str:
    inside = str(name).removeprefix(f"{RUN_DIR}/")
    return str(name) if inside == name else f"{inside} in the run folder"


def _section(settings: Any, name: str) -> Mapping[str, Any]:
    section = settings.get(name) if isinstance(settings, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def _read_versions(run_dir: Path) -> Mapping[str, str] | None:
    path = run_dir / VERSIONS_FILE
    if not path.exists():
        return None
    fix = "delete it, and the report leaves them out"
    return from_json(_VERSIONS, read_file(path, within=run_dir), f"{path} does not hold library versions", fix)
