"""Words for kinds of regions, and names of regions that ISO 3166-2 does not have, read from region_names.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import yaml


class _Tables(TypedDict):
    kinds: list[str]
    aliases: dict[str, list[str]]


_TABLES: _Tables = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

KINDS_OF_REGION = frozenset(_TABLES["kinds"])
"""Folded; dropped from the ends of a name."""

REGION_ALIASES = {code: tuple(regions) for code, regions in _TABLES["aliases"].items()}
"""By country: folded names of one region, apart by `|`."""
