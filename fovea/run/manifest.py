"""The manifest of a folder: size and SHA-256 of every file in it, written last, by which damage is found later.

`sha256sum` gives the same checksums. Hashing takes 0.6 seconds per GiB, less than most disks need to read it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from fovea.errors import DataError, first_line
from fovea.utils.bounded import check_inside, check_tree, read_file

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files in a folder."""
    files = {
        path.relative_to(folder).as_posix(): {key: measure(path) for key, measure in _MEASURES.items()}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    (folder / MANIFEST).write_text(json.dumps(files, indent=1))


def damage(folder: Path) -> str | None:
    """The first difference between a folder and its manifest, such as `policy.json is missing`; None if it is whole."""
    try:
        check_tree(folder)
        expected = json.loads(read_file(folder / MANIFEST))
        for key, measure in _MEASURES.items():
            for name, entry in expected.items():
                check_inside(folder / name, folder)
                if measure(folder / name) != entry[key]:
                    return f"{name} is not as it was written"
    except DataError as error:
        return str(error).partition(";")[0]
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(folder)} is missing"
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"its {MANIFEST} cannot be read ({first_line(error)})"
    return None


def _size(path: Path) -> int:
    return path.stat().st_size


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_MEASURES: Mapping[str, Callable[[Path], int | str]] = {"bytes": _size, "sha256": _sha256}
"""By the name of the entry; the size, which costs nothing, comes first."""
