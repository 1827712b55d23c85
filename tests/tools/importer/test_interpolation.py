"""References of OmegaConf."""

from __future__ import annotations

import pytest

from fovea.errors import ConfigError
from fovea.tools.importer.interpolation import resolve

VALUES = {
    "runner.seq_length": 8192,
    "data.max_prompt_length": 4096,
    "a.flag": True,
    "a.name": "x",
    "a.both": "${a.name}y",
}


@pytest.mark.parametrize(
    ("value", "resolved"),
    [
        ("${runner.seq_length}", 8192),
        ("${subtract:${runner.seq_length}, ${data.max_prompt_length}}", 4096),
        ("${int_div:${multiply:8, 64}, 4}", 128),
        ("${not:${a.flag}}", False),
        ("${oc.select:a.name,other}", "x"),
        ("${oc.select:a.missing,512}", 512),
        ("${.name}", "x"),
        ("${..a.name}/${a.name}", "x/x"),
        ("../results/${a.both}", "../results/xy"),
        ("no reference", "no reference"),
        (7, 7),
    ],
)
def test_a_reference_becomes_its_value(value: object, resolved: object) -> None:
    assert resolve(value, "a.key", VALUES.get) == resolved


def test_the_environment_gives_folders_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("A_KEY", "hunter2")
    values = ("${oc.env:HOME}/data", "${oc.env:A_KEY,none}", "${oc.env:NOT_SET_ANYWHERE}", "${oc.env:NOT_SET,3}")
    assert [resolve(value, "a.key", VALUES.get) for value in values] == ["/home/ann/data", "none", None, 3]
    assert resolve("${oc.env:A_KEY}", "a.key", VALUES.get, variables=None) == "hunter2", "where it is not shown"
    problem = r"^a.key: \$\{oc.env:A_KEY\} is set in the environment, which a recipe does not show; add a.key=VALUE"
    with pytest.raises(ConfigError, match=problem):
        resolve("${oc.env:A_KEY}", "a.key", VALUES.get)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${multiplied:2, 3}", "a.key: .* is a function that is not known here; write its value"),
        ("${multiply:2}", "a.key: .* has no value"),
        ("${int_div:2, 0}", "a.key: .* has no value"),
        ("${a.circle}", "a.key: its references lead in a circle"),
    ],
)
def test_a_reference_without_a_value_is_refused(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(value, "a.key", {"a.circle": "${a.circle}"}.get)
