"""The command that adds an extra to an installed package."""

from __future__ import annotations

import json
from importlib import metadata

import pytest

from fovea_gym.utils.installing import pip_install


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
        (None, "pip install 'fovea-rl-gym[hub]'"),
        ({"url": "https://host/fovea.whl"}, "pip install 'fovea-rl-gym[hub]'"),
        (
            {"url": "file:///src/fovea", "subdirectory": "gym", "vcs_info": {"vcs": "git", "commit_id": "1a2b"}},
            "pip install 'fovea-rl-gym[hub]'",
        ),
        ({"url": "file:///my%20code/gym", "dir_info": {}}, "pip install '/my code/gym[hub]'"),
        ({"url": "file:///src/fovea/gym", "dir_info": {"editable": True}}, "pip install -e '/src/fovea/gym[hub]'"),
    ],
)
def test_an_extra_comes_from_where_the_package_came_from(
    origin: dict[str, object] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda _name: Installed(origin))
    assert pip_install("hub") == command
