"""Graders by the name of their environment, where the extra of one of them is missing."""

from __future__ import annotations

import subprocess
import sys

from fovea_gym.utils.installing import pip_install

ROW = {"truth": "3"}
CODE = f"""
import sys

sys.modules["babel"] = None  # as if it were not installed

from fovea_gym.graders.by_name import grader_of
from fovea_gym.errors import MissingExtraError

for name in ("geo3k", "vqa", "shapes"):
    print(name, grader_of(name, [])("\\\\boxed{{3}}", {ROW}, "line 1").score)
try:
    grader_of("geospot", [])
except MissingExtraError as error:
    print(error)
"""


def test_only_geospot_needs_a_gazetteer() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["geo3k", "vqa", "shapes"], done.stderr
    assert all(float(line.split()[1]) > 0 for line in lines[:3])
    assert f"babel is not installed; {pip_install('geospot')}" in lines[3]
