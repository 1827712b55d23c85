"""The environment of `make test-sglang`: SGLang and Fovea beside each other."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement


def test_what_fovea_requires_is_installed_within_its_bounds() -> None:
    wanted = [Requirement(line) for line in metadata.requires("fovea-rl") or [] if "extra ==" not in line]
    assert len(wanted) > 15
    installed = {each.name: metadata.version(each.name) for each in wanted}
    unfit = [str(each) for each in wanted if not each.specifier.contains(installed[each.name], prereleases=True)]
    assert not unfit, installed


def test_transformers_is_what_sglang_requires() -> None:
    pinned = [Requirement(line) for line in metadata.requires("sglang") or [] if line.startswith("transformers")]
    assert all(each.specifier.contains(metadata.version("transformers")) for each in pinned)
