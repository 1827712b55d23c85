"""A model folder that one version of transformers wrote is the same model to the other: there and back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

VERSION_4 = Path(sys.executable)
VERSION_5 = Path(os.environ.get("FOVEA_TRANSFORMERS_5_PYTHON", ".venv/bin/python"))
"""Interpreter of the environment that everything but Megatron runs in."""
PATIENCE = 300.0


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_either_version_reads_what_the_other_wrote(family: str, tmp_path: Path) -> None:
    for writer in (VERSION_4, VERSION_5):
        folder = tmp_path / f"by-{transformers_of(writer)[0]}"
        run(writer, "write", family, str(folder))
        readings = []
        for reader in (VERSION_4, VERSION_5):
            out = folder.with_suffix(f".{transformers_of(reader)[0]}.npz")
            run(reader, "read", str(folder), str(out))
            readings.append(np.load(out))
        old, new = readings
        for name in ("token_ids", "images", "positions"):
            np.testing.assert_array_equal(old[name], new[name], err_msg=f"{name} of {folder.name}")
        np.testing.assert_allclose(old["logprobs"], new["logprobs"], atol=1e-5, rtol=0, err_msg=folder.name)


def test_the_environments_have_both_versions() -> None:
    assert transformers_of(VERSION_4).startswith("4.57.")
    assert transformers_of(VERSION_5).startswith("5.")


def transformers_of(python: Path) -> str:
    code = "from importlib.metadata import version; print(version('transformers'))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def run(python: Path, *arguments: str) -> None:
    command = [python, "-m", "tests.train.megatron.model_folder", *arguments]
    done = subprocess.run(command, timeout=PATIENCE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
