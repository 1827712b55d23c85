"""Names of countries that neither ISO 3166 nor CLDR has, read from country_names.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import yaml


class _Tables(TypedDict):
    aliases: dict[str, list[str]]
    extra_codes: dict[str, str]
    words_in_lower_case: list[str]
    long_forms: list[str]
    foreign_words: list[str]
    languages: list[str]


_TABLES: _Tables = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

ALIASES = {code: tuple(names) for code, names in _TABLES["aliases"].items()}
"""By ISO 3166-1 alpha-2 code. These names outrank every other source."""

EXTRA_CODES = _TABLES["extra_codes"]
"""Codes in use beside ISO's own."""

WORDS_IN_LOWER_CASE = frozenset(_TABLES["words_in_lower_case"])
"""Codes that are also words: codes only in capitals."""

LONG_FORMS = tuple(_TABLES["long_forms"])
"""Phrases that may stand before a country's short name."""

FOREIGN_WORDS = frozenset(_TABLES["foreign_words"])
"""Names in some language that are also words of English."""

LANGUAGES = tuple(_TABLES["languages"])
"""Locales of CLDR whose names of countries are known besides English."""
