"""Rows in memory as arguments: which settings they replace, and what is held out of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fovea.api.settings import is_set
from fovea.build.given import ARGUMENTS, Frames
from fovea.data.rows import InMemory, given_rows
from fovea.environments.base import Split
from fovea.errors import ConfigError

FileName: TypeAlias = str | os.PathLike[str]
RowsArgument: TypeAlias = FileName | Sequence[FileName] | InMemory | None
"""Rows in memory, or the name of a file or data set, or a list of names, as `environment.train_files` has them."""

TEST_SHARE = 0.1
"""Share of the rows that is held out for the final figures where no test rows are given."""


ASKED: Mapping[str, object] = {"environment.test_files": [], "environment.test_share": 0.0}
"""Settings that make room for test rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsArguments:
    """The rows of the splits, where they are given."""

    rows: RowsArgument = None
    test_rows: RowsArgument = None
    dev_rows: RowsArgument = None

    @property
    def frames(self) -> Frames:
        """Those in memory."""
        return {split: rows for split, rows in self._given.items() if not _file_names(rows)}

    @property
    def _files(self) -> dict[str, object]:
        """The settings that name the others."""
        files = {split: _file_names(rows) for split, rows in self._given.items()}
        return {f"environment.{split}_files": names for split, names in files.items() if names}

    @property
    def _given(self) -> dict[Split, Any]:
        given: dict[Split, RowsArgument] = {"train": self.rows, "dev": self.dev_rows, "test": self.test_rows}
        return {split: rows for split, rows in given.items() if rows is not None}

    def check(self) -> None:
        """DataError for an argument that is no table, holds no rows or has two columns of one name."""
        for split, rows in self.frames.items():
            given_rows(rows, ARGUMENTS[split])

    def settings(self, *others: Mapping[str, object]) -> dict[str, object]:
        """The settings that make room for the rows; `others` are those that the user has given beside them.

        Rows replace the files of a recipe in all splits: what is not given is held out of `rows`.
        """
        if self.rows is None:
            if self._given:
                raise ConfigError("test_rows and dev_rows are given, but no rows to train on; give rows, too")
            return {}
        made: dict[str, object] = {"environment.train_files": []}
        if self.test_rows is not None:
            made |= ASKED
        elif not is_set("environment.test_files", *others):
            made["environment.test_files"] = None
            if not is_set("environment.test_share", *others):
                made["environment.test_share"] = TEST_SHARE
        if not is_set("environment.dev_files", *others):
            made["environment.dev_files"] = None
        return made | self._files


def _file_names(rows: Any) -> list[str]:
    """The names, where rows are given by the name of a file or a list of names."""
    names = rows if isinstance(rows, list | tuple) else [rows]
    return [os.fspath(name) for name in names] if all(isinstance(name, str | os.PathLike) for name in names) else []
