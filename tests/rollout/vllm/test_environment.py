"""The environment of `make test-vllm`: vLLM and Fovea beside each other."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

from packaging.requirements import Requirement


def test_what_fovea_requires_is_installed_within_its_bounds() -> None:
    wanted = [Requirement(line) for line in metadata.requires("fovea-rl") or [] if "extra ==" not in line]
    assert len(wanted) > 15
    installed = {each.name: metadata.version(each.name) for each in wanted}
    unfit = [str(each) for each in wanted if not each.specifier.contains(installed[each.name], prereleases=True)]
    assert not unfit, installed


def test_vllm_and_the_command_line_start() -> None:
    # in processes of their own, as vLLM's workers are: the torchvision beside a CPU build of torch has to import there
    for statement in ("import vllm, torchvision; from transformers import AutoProcessor", "import fovea.cli.main"):
        subprocess.run([sys.executable, "-c", statement], check=True, timeout=120)
