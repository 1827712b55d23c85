"""The command that adds an extra to this installation."""

from __future__ import annotations

import json
from importlib import metadata

import pytest

from fovea.utils.installing import pip_install


class Installed:
    """A distribution as pip records it."""

    def __init__(self, origin: dict[str, object] | None) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._origin is None else json.dumps(self._origin)


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'fovea-rl[hub]'"),
        ({"url": "https://host/fovea.whl"}, "pip install 'fovea-rl[hub]'"),
        ({"url": "file:///my%20code/fovea", "dir_info": {}}, "pip install '/my code/fovea[hub]'"),
        ({"url": "file:///src/fovea", "dir_info": {"editable": True}}, "pip install -e '/src/fovea[hub]'"),
    ],
)
def test_an_extra_comes_from_where_fovea_came_from(
    origin: dict[str, object] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda _name: Installed(origin))
    assert pip_install("hub") == command
