"""The fingerprint of what a run reads, and what of it is no longer the same when the run resumes.

A fingerprint is a mapping of names to short texts: `train row 24` to a checksum of that row, `file train.parquet` to
its size and checksum, `library torch` to a version. A checkpoint holds it; `fovea.run.inputs` takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fovea.errors import DataError

Fingerprint: TypeAlias = Mapping[str, str]
LIBRARY = "library "
"""Beginning of the names of library versions."""
IMPORT = ", its import "
"""Middle of the names of modules that the user's code imports; a new import is a change of the code as well."""
MAX_NAMED = 3
"""Changes that a message names; of the others it gives the number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An entry of a fingerprint that is not what it was."""

    name: str
    before: str | None
    """None: it was not there."""
    now: str | None

    @property
    def is_patch(self) -> bool:
        """True if it is another patch version of a library, such as 2.9.1 for 2.9.0."""
        if not self.name.startswith(LIBRARY) or self.before is None or self.now is None:
            return False
        return self.before.split(".")[:2] == self.now.split(".")[:2]

    def __str__(self) -> str:
        return f"{self.name} was {self.before or 'not there'} and is {self.now or 'not there'}"


def library_versions(fingerprint: Fingerprint) -> dict[str, str]:
    """The versions of libraries in a fingerprint, by name."""
    return {name.removeprefix(LIBRARY): text for name, text in fingerprint.items() if name.startswith(LIBRARY)}


def changes(before: Fingerprint, now: Fingerprint) -> list[Change]:
    """The entries that differ between two fingerprints, in their order."""
    return [
        Change(name=name, before=before.get(name), now=now.get(name))
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
        # checkpoints of earlier versions do not have them
        and not (IMPORT in name and name not in before)
    ]


def check_unchanged(before: Fingerprint, now: Fingerprint, *, allow: bool, say: Callable[[str], None]) -> None:
    """DataError for changes, which it names; with `allow`, or only for patch versions, they are printed instead."""
    changed = changes(before, now)
    refused = [] if allow else [change for change in changed if not change.is_patch]
    if refused:
        raise DataError(
            f"this run would go on with other inputs than it has read so far: {_listed(refused)}; set them back, "
            "set resume_changed=allow to go on with what is there now, or start anew in another run_dir"
        )
    if changed:
        say(f"other inputs than before the resume: {_listed(changed)}")


def _listed(changed: Sequence[Change]) -> str:
    more = f"; and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
    return "; ".join(map(str, changed[:MAX_NAMED])) + more
