"""`benchmarks/first_visit.sh` fits into one command of a lent machine, and what its parts name is there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu import _parse
from benchmarks.mutations import ROOT
from fovea.config.loading import load_config
from fovea.config.recipes import shipped_recipe

SCRIPT = ROOT / "benchmarks" / "first_visit.sh"
TEXT = SCRIPT.read_text(encoding="utf-8").replace("\\\n", " ")
PARTS = {
    line.split()[1]: shlex.split(line)[2:] for line in TEXT.splitlines() if re.match(r'part \d-\w+ \d+ "\$py"', line)
}
LIMITS = [int(limit) for limit in re.findall(r"^part \d-\w+ (\d+) ", TEXT, re.MULTILINE)]


def test_it_is_a_script_of_580_seconds_at_most() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    grace = re.search(r"timeout -k (\d+)", TEXT)
    assert grace is not None
    assert len(LIMITS) == len(PARTS) + 1 == 5
    assert sum(LIMITS) + len(LIMITS) * int(grace[1]) <= 580


def test_each_part_names_what_is_there() -> None:
    assert all(find_spec(words[3]) is not None for words in PARTS.values())
    files = [word for words in PARTS.values() for word in words if word.endswith(".py")]
    assert files
    assert [file for file in files if "pytest.mark.gpu" not in (ROOT / file).read_text(encoding="utf-8")] == []
    assert len(re.findall(r"bench=\((.*?)\)", TEXT)) == 2
    for options in re.findall(r"bench=\((.*?)\)", TEXT):
        assert _parse(options.split()).seconds < LIMITS[2]


def test_the_gym_and_the_tools_are_found_without_an_installation(tmp_path: Path) -> None:
    found = re.search(r"<<'END' \|\| exit 1\n(.*?)\nEND", TEXT, re.DOTALL)
    assert found is not None
    subprocess.run([sys.executable, "-c", found[1], str(tmp_path)], cwd=ROOT, check=True)
    installed = {
        each.name: {(point.group, point.name) for point in each.entry_points}
        for each in distributions(path=[str(tmp_path)])
    }
    assert ("fovea.environments", "frozen_lake") in installed["fovea-rl-gym"]
    assert installed["fovea-rl-tools"] >= {("fovea.doctor", "gpu"), ("fovea.commands", "plan")}


def test_its_run_is_one_that_starts() -> None:
    recipe, *settings = PARTS["3-train"][5:]
    config = load_config([shipped_recipe(recipe)], [word for word in settings if "$" not in word])
    assert config.profile
    assert config.max_steps == 8
